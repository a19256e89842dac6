"""What is decided about requests to registries: where, how often, as whom. And TLS and proxies, for real."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import HostFault, InvalidRequest, Unreachable
from agentenv.image.credentials import Credentials
from agentenv.image.reference import parse
from agentenv.image.registry import docker_config, retry
from agentenv.image.registry.access import Access, Endpoint, endpoints
from agentenv.image.registry.challenge import Challenge, challenges, token_url
from agentenv.image.registry.client import Client
from agentenv.image.registry.docker_config import Login
from support.registry import Answer, Front, credential_helper
from support.registry import docker_config as written

# Where


def test_mirrors_come_first_and_only_listed_hosts_are_spoken_to_in_the_clear() -> None:
    access = Access(mirrors={"docker.io": ("m.example", "local:5000")}, insecure=("local:5000",))
    assert endpoints(parse("alpine"), access) == (
        Endpoint("m.example", "https://m.example", True),
        Endpoint("local:5000", "http://local:5000", True),
        Endpoint("docker.io", "https://registry-1.docker.io", False),
    )
    assert endpoints(parse("local:5000/a"), access) == (Endpoint("local:5000", "http://local:5000", False),)
    assert endpoints(parse("local:5001/a"), access)[0].url == "https://local:5001"
    assert access.allows("http://local:5000/x")
    assert not any(
        access.allows(url) for url in ("http://local/x", "http://local:5001/", "ftp://local:5000/")
    )


def test_a_mirror_with_a_scheme_is_no_host() -> None:
    with pytest.raises(InvalidRequest, match="without a scheme"):
        endpoints(parse("alpine"), Access(mirrors={"docker.io": ("http://m.example",)}))


def test_access_passes_between_processes() -> None:
    access = Access({"docker.io": ("m",)}, ("a:1",), Path("/ca.pem"), Path("/d"), 7)
    assert Access.from_document(json.loads(json.dumps(access.document()))) == access
    assert Access.from_document(json.loads(json.dumps(Access().document()))) == Access()


# How often


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7), ("0", 0), ("Thu, 01 Jan 1970 00:02:00 GMT", 20), ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
     ("", None), ("soon", None), ("-1", None), ("1.5", None)],
)  # fmt: skip
def test_retry_after(value: str, seconds: float | None) -> None:
    assert retry.asked_wait({"retry-after": value} if value else {}, 100.0) == seconds


@given(st.text(max_size=30))
def test_any_retry_after_is_a_wait_or_none(value: str) -> None:
    wait = retry.asked_wait({"retry-after": value}, 0.0)
    assert wait is None or wait >= 0


def test_waits_grow_and_end() -> None:
    waits = [retry.wait(attempt, None, 0.0) for attempt in range(1, retry.ATTEMPTS + 1)]
    assert waits == [0.5, 1.0, 2.0, 4.0, None]
    assert retry.wait(1, 3.0, 0.5) == 3.5
    assert retry.wait(1, retry.LONGEST_WAIT_S + 1, 0.0) is None


# As whom


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ('Basic realm="a b"', [Challenge("basic", {"realm": "a b"})]),
        (
            'Bearer realm="https://a/t?x=1",service="s",scope="repository:a/b:pull,push"',
            [
                Challenge(
                    "bearer",
                    {"realm": "https://a/t?x=1", "service": "s", "scope": "repository:a/b:pull,push"},
                )
            ],
        ),
        (
            'Basic realm="a", Bearer realm="b\\"c" , service=d',
            [Challenge("basic", {"realm": "a"}), Challenge("bearer", {"realm": 'b"c', "service": "d"})],
        ),
        ("Negotiate", [Challenge("negotiate", {})]),
        ("", []),
    ],
)
def test_challenges(header: str, found: list[Challenge]) -> None:
    assert list(challenges([header])) == found


@given(st.lists(st.text(alphabet='Basic Bearer=",\\r', max_size=60), max_size=3))
def test_any_header_is_read(headers: list[str]) -> None:
    for found in challenges(headers):
        assert found.scheme == found.scheme.lower()


def test_where_a_token_is_got() -> None:
    bearer = Challenge("bearer", {"realm": "https://a/t?x=1", "service": "the s"})
    assert token_url(bearer, "a/b") == "https://a/t?x=1&service=the+s&scope=repository%3Aa%2Fb%3Apull"
    for realm in ("", "/token", "file:///etc/passwd"):
        assert token_url(Challenge("bearer", {"realm": realm}), "a") is None


def auth(pair: str) -> str:
    return base64.b64encode(pair.encode()).decode()


@pytest.mark.parametrize(
    ("host", "entry", "login"),
    [
        (
            "docker.io",
            {"https://index.docker.io/v1/": {"auth": auth("u:p:w")}},
            Login(Credentials("u", "p:w")),
        ),
        ("a.io", {"a.io": {"username": "u", "password": "p"}}, Login(Credentials("u", "p"))),
        ("a.io", {"a.io": {"registrytoken": "t"}}, Login(Credentials(token="t"))),
        ("a.io", {"b.io": {"auth": auth("u:p")}}, None),
        ("a.io", {"a.io": {"auth": "!"}}, None),
        ("a.io", {"a.io": {}}, None),
        ("a.io", {"a.io": 5}, None),
    ],
)
async def test_dockers_configuration(
    tmp_path: Path, host: str, entry: dict[str, Any], login: Login | None
) -> None:
    assert await docker_config.login(written(tmp_path, {"auths": entry}), host) == login


async def test_no_configuration_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    assert await docker_config.login(tmp_path / "none", "a.io") is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidRequest, match="not JSON"):
        await docker_config.login(tmp_path, "a.io")


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("echo 'credentials not found in native keychain'; exit 1", None),
        ("""echo '{"Username": "<token>", "Secret": "t"}'""", Login(None, "t")),
        ("exit 3", HostFault),
        ("echo secret-not-json", HostFault),
    ],
)
async def test_credential_helpers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, outcome: Any
) -> None:
    credential_helper(tmp_path / "bin", "mine", f"cat >/dev/null\n{script}")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    config = written(tmp_path / "docker", {"credHelpers": {"a.io": "mine"}})
    if outcome is HostFault:
        with pytest.raises(HostFault) as caught:
            await docker_config.login(config, "a.io")
        assert "secret" not in str(caught.value)
    else:
        assert await docker_config.login(config, "a.io") == outcome


@pytest.mark.parametrize("name", ["../evil", "a b", "", "/bin/sh", 7])
async def test_a_helpers_name_is_no_path(tmp_path: Path, name: object) -> None:
    config = written(tmp_path, {"credHelpers": {"a.io": name}})
    if name:
        with pytest.raises(InvalidRequest, match="no credential helper"):
            await docker_config.login(config, "a.io")
    else:
        assert await docker_config.login(config, "a.io") is None


async def test_a_helper_that_is_not_there(tmp_path: Path) -> None:
    config = written(tmp_path, {"credsStore": "nowhere-to-be-found"})
    with pytest.raises(HostFault, match="docker-credential-nowhere-to-be-found cannot be run"):
        await docker_config.login(config, "a.io")


# TLS and proxies


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that nobody has signed, with its key."""
    path = tmp_path / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tests"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", str(path) + ".crt"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@pytest.fixture
def tls_front(certificate: Path) -> Iterator[Front]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = Front(None, lambda asked: Answer(200, {}, b"told"), tls=context)
    yield server
    server.close()


async def ask(access: Access, host: str) -> bytes:
    async with Client(access, "a/b", sleep=lambda seconds: asyncio.sleep(0)) as client:
        endpoint = endpoints(parse(f"{host}/a/b"), access)[0]
        async with client.get(endpoint, "manifests/latest") as response:
            return await response.aread()


async def test_certificates_of_ones_own(tls_front: Front, certificate: Path) -> None:
    with pytest.raises(Unreachable, match="certificate verify failed"):
        await ask(Access(), tls_front.host)
    assert await ask(Access(ca_file=Path(f"{certificate}.crt")), tls_front.host) == b"told"
    with pytest.raises(InvalidRequest, match="cannot be used"):
        await ask(Access(ca_file=Path("/etc/hostname")), tls_front.host)


async def test_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Front(None, lambda asked: Answer(200, {}, asked.path.encode()))
    for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://{proxy.host}")
    try:
        told = await ask(Access(insecure=("registry.test",)), "registry.test")
        assert told == b"http://registry.test/v2/a/b/manifests/latest"
        monkeypatch.setenv("no_proxy", "registry.test")
        with pytest.raises(Unreachable):
            await ask(Access(insecure=("registry.test",)), "registry.test")
    finally:
        proxy.close()
