"""E2B's clients by names and TLS alone, as against E2B itself: no URL of the node is told to them.

A small server of the test resolves the names; clients ask it through a resolv.conf of their own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentenv.tls import authority
from support.dns import Upstream
from support.home import linked_home
from support.npm import PROGRAMS
from support.running import RunningNode

pytestmark = [pytest.mark.machine]

HERE = Path(__file__).parent
DOMAIN = "sandbox.test"
NAME_SERVER = "127.0.53.53"


@dataclass(frozen=True)
class Named:
    """A node that is reached by its domain."""

    node: RunningNode
    domain: str
    authority: Path
    resolv_conf: Path

    def run(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> dict[str, Any]:
        """Run a client that knows the domain, and finds its names; what it printed."""
        # Another node's addresses may be there, as other tests' clients are told them.
        kept = {
            name: value
            for name, value in os.environ.items()
            if "proxy" not in name.lower() and not name.startswith("E2B_")
        }
        own = 'mount --bind "$0" "$(realpath /etc/resolv.conf)" && exec "$@"'
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", own, self.resolv_conf, *command],
            env={**kept, "E2B_DOMAIN": self.domain, "E2B_API_KEY": self.node.key, **environment},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        printed: dict[str, Any] = json.loads(done.stdout)
        return printed


@pytest.fixture(scope="module")
def named(
    node_factory: Callable[..., RunningNode], node_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Named]:
    home = linked_home(node_directory / "tls")
    authority.establish(home / "tls", DOMAIN)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    node = node_factory("tls", home=home, domain=f"{DOMAIN}:{port}", tls_port=str(port))
    resolv_conf = tmp_path_factory.mktemp("etc") / "resolv.conf"
    resolv_conf.write_text(f"nameserver {NAME_SERVER}\n")
    names = Upstream(address=NAME_SERVER, give="127.0.0.1")
    yield Named(node, f"{DOMAIN}:{port}", home / "tls/ca.pem", resolv_conf)
    names.close()
    node.close()


def test_python(named: Named, host_audit: None) -> None:
    printed = named.run([sys.executable, HERE / "tls_client.py"], {"SSL_CERT_FILE": str(named.authority)})
    assert printed["host"].endswith(f".{named.domain}")


def test_javascript(named: Named, npm_packages: Path, host_audit: None) -> None:
    printed = named.run(
        [PROGRAMS / "node", HERE / "tls_client.mjs"],
        {"NODE_EXTRA_CA_CERTS": str(named.authority), "AENV_TEST_NPM": str(npm_packages)},
    )
    assert printed["host"].endswith(f".{named.domain}")
