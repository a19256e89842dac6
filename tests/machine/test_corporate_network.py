"""A node behind a proxy that opens TLS: guests get its address and trust its certificates, and no more."""

from __future__ import annotations

import http.server
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.running import RunningNode
from support.serving import serving

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

ADDRESS = "10.77.13.9"  # of a denied range, on this host: what only an operator's word opens


class Answering(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"you asked for {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    subprocess.run(["ip", "address", "add", f"{ADDRESS}/32", "dev", "lo"], check=True)
    yield ADDRESS
    subprocess.run(["ip", "address", "del", f"{ADDRESS}/32", "dev", "lo"], check=True)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for the address, which vouches for itself; its key is beside it."""
    file = tmp_path_factory.mktemp("tls") / "corporate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-days", "2", "-subj", "/CN=corporate", "-addext", f"subjectAltName=IP:{ADDRESS}",
         "-keyout", str(file.with_suffix(".key")), "-out", str(file)],
        check=True, capture_output=True,
    )  # fmt: skip
    return file


@pytest.fixture(scope="module")
def plain(address: str) -> Iterator[int]:
    """The port of the proxy: an absolute URL is what it is asked for."""
    with serving(Answering, address) as port:
        yield port


@pytest.fixture(scope="module")
def mirror(address: str, certificate: Path) -> Iterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    with serving(Answering, address, context) as port:
        yield port


def test_guests_use_the_node_s_proxy_and_trust_its_certificates(
    node_factory: Callable[..., RunningNode],
    plain: int,
    mirror: int,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{ADDRESS}:{plain}")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    node = node_factory(
        "corporate",
        ca_file=str(certificate),
        guest_env='{"PIP_INDEX_URL": "https://mirror.corp/simple"}',
        open_addresses=f'["{ADDRESS}:{mirror}"]',
    )
    sandbox = node.sandbox("base")
    try:
        run = sandbox.commands.run
        assert run("echo $PIP_INDEX_URL").stdout == "https://mirror.corp/simple\n"
        assert (
            run("curl -sS http://some.where.example/x").stdout == "you asked for http://some.where.example/x"
        )
        url = f"https://{ADDRESS}:{mirror}/y"
        assert run(f"curl -sS {url}").stdout == "you asked for /y"
        fetch = f"import urllib.request as u; print(u.urlopen('{url}').read().decode())"
        assert run(f'python3 -c "{fetch}"').stdout == "you asked for /y\n"
        with serving(Answering, ADDRESS) as closed:  # what nobody opened stays closed
            check = f"curl -sS --noproxy '*' -m 5 http://{ADDRESS}:{closed}/ || echo refused"
            assert run(check).stdout == "refused\n"
    finally:
        sandbox.kill()
