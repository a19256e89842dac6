"""What a guest's network is like: names resolve; the host and other sandboxes are out of reach."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox

from agentenv.network import namespace
from agentenv.records.database import Database
from agentenv.sandbox.records import decode
from support.nethost import listen, made_place, run, saying
from support.running import RunningNode
from support.zone import Zone

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

RESOLVER = "127.0.0.153"
PUBLIC = ("198.18.9.77", "198.18.9.78")  # of a range for such (RFC 2544), not of one that this host may use
PUBLIC6 = "2001:db8:77::77"
FORWARDS = Path("/proc/sys/net/ipv6/conf/lo/force_forwarding").exists()
LINK = "internet0"  # no name that begins as those of nodes, which sandboxes do not reach


@pytest.fixture(scope="module")
def upstream() -> Iterator[Zone]:
    """The name server that the node asks for its guests."""
    server = Zone(address=RESOLVER)
    server.put("some.example.org", "some.example.org 60 A 192.0.2.77")
    server.put("allowed.test", f"allowed.test 60 CNAME edge.test\nedge.test 60 A {PUBLIC[0]}")
    server.put("other.test", f"other.test 60 A {PUBLIC[1]}")
    yield server
    server.close()


@pytest.fixture(scope="module")
def internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Public servers beyond a link of the host; each says its address to who comes."""
    place = tmp_path_factory.mktemp("internet") / "netns"
    with ExitStack() as stack:
        made_place(place, stack)
        run("ip", "link", "add", LINK, "type", "veth", "peer", "name", "far", "netns", str(place))
        stack.callback(run, "ip", "link", "del", LINK)
        run("ip", "addr", "add", "198.18.9.1/24", "dev", LINK)
        run("ip", "addr", "add", "2001:db8:77::1/64", "dev", LINK, "nodad")
        run("ip", "link", "set", LINK, "up")
        with namespace.inside(place):
            for address in PUBLIC:
                run("ip", "addr", "add", f"{address}/24", "dev", "far")
            run("ip", "addr", "add", f"{PUBLIC6}/64", "dev", "far", "nodad")
            run("ip", "link", "set", "far", "up")
        for address in (*PUBLIC, PUBLIC6):
            listen(stack, place, address, 80, saying(address.encode()))
        yield


@pytest.fixture(scope="module")
def net_node(upstream: Zone, internet: None, node_factory: Callable[..., RunningNode]) -> RunningNode:
    return node_factory("net", nameservers=f'["{RESOLVER}"]', ipv6="on" if FORWARDS else "off")


@pytest.fixture
def guest(net_node: RunningNode) -> Iterator[Callable[..., Sandbox]]:
    made: list[Sandbox] = []

    def create(**more: Any) -> Sandbox:
        made.append(net_node.sandbox("base", **more))
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


def test_names_resolve_through_the_node(guest: Callable[..., Sandbox], upstream: Zone) -> None:
    sandbox = guest()
    assert sandbox.commands.run("getent ahostsv4 some.example.org").stdout.startswith("192.0.2.77")
    assert "udp" in upstream.transports


def test_neither_the_host_nor_another_sandbox_is_reached(
    guest: Callable[..., Sandbox], net_node: RunningNode
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


# What is reached of each, as a program of any kind does it: the name is looked up, then connected to.
PROBE = """
import socket, sys
for host in sys.argv[1:]:
    try:
        with socket.create_connection((host, 80), 5) as connection:
            connection.sendall(b"?")
            print(connection.recv(100).decode())
    except OSError as error:
        print(type(error).__name__)
"""


def test_a_sandbox_of_names_reaches_exactly_those(guest: Callable[..., Sandbox], upstream: Zone) -> None:
    allowed, other = PUBLIC
    network = {"allow_out": ["allowed.test"], "deny_out": ["0.0.0.0/0"]}
    sandbox = guest(network=network)
    sandbox.files.write("/tmp/probe.py", PROBE)

    def probe(*hosts: str) -> list[str]:
        return sandbox.commands.run(f"python3 /tmp/probe.py {' '.join(hosts)}").stdout.split()

    refused = "ConnectionRefusedError"
    assert probe(allowed) == [refused]  # its name has not been asked for yet
    assert probe("allowed.test", allowed) == [allowed, allowed]
    assert probe("other.test", other, "some.example.org") == ["gaierror", refused, "gaierror"]
    assert "other.test" not in {name for name, _, _ in upstream.asked}
    sandbox.update_network({"allow_out": ["other.test"], "deny_out": ["0.0.0.0/0"]})
    assert probe("allowed.test", allowed, "other.test") == ["gaierror", refused, other]


@pytest.mark.skipif(not FORWARDS, reason="this kernel forwards IPv6 for all interfaces or none")
def test_a_guest_has_ipv6_where_the_node_has(guest: Callable[..., Sandbox], upstream: Zone) -> None:
    upstream.put("both.test", f"both.test 60 A {PUBLIC[0]}\nboth.test 60 AAAA {PUBLIC6}")
    sandbox = guest(network={"allow_out": ["both.test"], "deny_out": ["0.0.0.0/0"]})
    sandbox.files.write("/tmp/probe.py", PROBE)

    def probe(*hosts: str) -> list[str]:
        return sandbox.commands.run(f"python3 /tmp/probe.py {' '.join(hosts)}").stdout.split()

    assert probe(PUBLIC6) == ["ConnectionRefusedError"]
    (reached,) = probe("both.test")
    assert reached in (PUBLIC[0], PUBLIC6)
    assert probe(PUBLIC6) == [PUBLIC6]
    sandbox.pause()
    sandbox.connect()
    assert probe("both.test", PUBLIC6)[1] == PUBLIC6  # it still has its address, and its rules
