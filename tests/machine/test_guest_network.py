"""What a guest's network is like: names resolve; the host and other sandboxes are out of reach."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from e2b import Sandbox

from agentenv.records.database import Database
from agentenv.sandbox.records import decode
from support.dns import Upstream
from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

RESOLVER = "127.0.0.153"


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    """The name server that the node asks for its guests."""
    server = Upstream(address=RESOLVER, give="192.0.2.77")
    yield server
    server.close()


@pytest.fixture(scope="module")
def net_node(upstream: Upstream, node_factory: Callable[..., RunningNode]) -> RunningNode:
    return node_factory("net", nameservers=f'["{RESOLVER}"]')


@pytest.fixture
def guest(net_node: RunningNode) -> Iterator[Callable[[], Sandbox]]:
    made: list[Sandbox] = []

    def create() -> Sandbox:
        made.append(net_node.sandbox("base"))
        return made[-1]

    yield create
    for sandbox in made:
        sandbox.kill()


def reaches(sandbox: Sandbox, address: str, port: int) -> bool:
    """Whether a connection from the guest is accepted."""
    check = f"timeout 10 bash -c 'exec 3<>/dev/tcp/{address}/{port}' && echo yes || echo no"
    return sandbox.commands.run(check, timeout=30).stdout.strip() == "yes"


def address_of(node: RunningNode, sandbox: Sandbox) -> str:
    database = Database(node.home / "aenv.db")
    try:
        row = database.query("SELECT document FROM sandboxes WHERE id = ?", (sandbox.sandbox_id,))[0]
    finally:
        database.close()
    slot = decode(row["document"]).slot
    assert slot is not None
    return slot.address


def test_names_resolve_through_the_node(guest: Callable[[], Sandbox], upstream: Upstream) -> None:
    sandbox = guest()
    assert sandbox.commands.run("getent ahostsv4 some.example.org").stdout.startswith("192.0.2.77")
    assert "udp" in upstream.transports


def test_neither_the_host_nor_another_sandbox_is_reached(
    guest: Callable[[], Sandbox], net_node: RunningNode
) -> None:
    one, other = guest(), guest()
    served = other.commands.run("python3 -u -m http.server 8000", background=True, timeout=0)
    with socket.create_server(("0.0.0.0", 0)) as on_host:
        port = on_host.getsockname()[1]
        api = int(net_node.url.rpartition(":")[2])
        for address in (address_of(net_node, one), address_of(net_node, other), "169.254.0.22", "10.0.0.1"):
            assert not reaches(one, address, port), address
            assert not reaches(one, address, api), address
        assert not reaches(one, address_of(net_node, other), 8000)
    served.kill()
    assert reaches(one, "127.0.0.1", 49983)  # its own agent: the check itself works
