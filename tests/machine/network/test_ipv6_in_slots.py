"""IPv6 of guests, packet by packet: translated to the host's, and under the same rules as IPv4."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import dns.message
import pytest

from agentenv.errors import HostIncapable
from agentenv.guest import ipv6
from agentenv.network import forwarding, namespace
from agentenv.network.policy import Policy, parse
from agentenv.network.resolver import Resolver
from agentenv.network.slot import GATEWAY_ADDRESS, GATEWAY_ADDRESS6, GATEWAY_MAC, GUEST_ADDRESS6, Slot
from agentenv.network.slots import Slots
from agentenv.network.upstreams import Upstreams
from support.nethost import (
    HOST6,
    NAMES,
    NetHost,
    NetNode,
    connect,
    datagram,
    peer,
    reached,
    refusal,
    run,
    saying,
)
from support.zone import Zone

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(
        not Path("/proc/sys/net/ipv6/conf/lo/force_forwarding").exists(),
        reason="this kernel forwards IPv6 for all interfaces or none",
    ),
]

WEB6, OTHER6 = "2001:db8:1::10", "2001:db8:2::10"
PRIVATE6 = "fd99::1"
MAPPED6 = "64:ff9b::a63:1"  # NAT64 of a private address
ALL = ["0.0.0.0/0"]


@pytest.fixture
def host(host: NetHost) -> NetHost:
    host.add_ipv6(WEB6, OTHER6, PRIVATE6, MAPPED6)
    return host


@pytest.fixture
async def slot(slots: Slots) -> Slot:
    return await slots.acquire("machine")


@pytest.fixture
def guest(host: NetHost, slot: Slot, monkeypatch: pytest.MonkeyPatch) -> Path:
    return with_ipv6(host.guest(slot), monkeypatch)


def with_ipv6(guest: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guest after its agent has been told that there is IPv6."""
    monkeypatch.setattr(ipv6, "_is_on", False)
    with namespace.inside(guest):
        ipv6.set_up(True)
    return guest


async def is_reached(place: Path, address: str, port: int = 80) -> bool:
    """Whether a connection is made; a refusal has to come at once."""
    try:
        connection = await asyncio.to_thread(connect, place, address, port)
    except TimeoutError:
        pytest.fail(f"{address} is neither reached nor refused")
    except OSError:
        return False
    connection.close()
    return True


async def test_a_guest_reaches_the_internet_as_the_host(host: NetHost, slots: Slots, guest: Path) -> None:
    assert slots.ipv6
    host.listen(host.internet, WEB6, 80, peer)
    assert await reached(guest, WEB6, 80) == HOST6.encode()


async def test_the_agent_sets_it_up_at_once_and_takes_it_back(guest: Path) -> None:
    with namespace.inside(guest):
        ipv6.set_up(True)  # does nothing more
        shown = run("ip", "-6", "addr", "show", "dev", "eth0")
        assert GUEST_ADDRESS6 in shown and "tentative" not in shown and "fe80" not in shown
        assert GATEWAY_ADDRESS6 in run("ip", "-6", "route", "show", "default")
        assert f"{GATEWAY_ADDRESS6} dev eth0 lladdr {GATEWAY_MAC} PERMANENT" in run("ip", "-6", "neigh")
        ipv6.set_up(False)
        assert run("ip", "-6", "addr", "show", "dev", "eth0") == ""
        ipv6.set_up(True)
        assert GUEST_ADDRESS6 in run("ip", "-6", "addr", "show", "dev", "eth0")


async def test_every_rule_holds_for_ipv6(host: NetHost, slots: Slots, slot: Slot, guest: Path) -> None:
    for address in (WEB6, OTHER6):
        host.listen(host.internet, address, 80, saying(b"public"))
    for policy, expected in (
        (parse(None, None), (True, True)),
        (parse(None, False), (False, False)),
        (parse({"denyOut": ALL}, None), (False, False)),
        (parse({"denyOut": [WEB6]}, None), (False, True)),
        (parse({"denyOut": ["2001:db8::/32"], "allowOut": [WEB6]}, None), (True, False)),
        (parse({"denyOut": ALL, "allowOut": ["2001:db8:2::/48"]}, None), (False, True)),
        (parse({"denyOut": ALL, "allowOut": ["1.1.1.1"]}, None), (False, False)),
    ):
        await slots.apply(slot, policy)
        assert (await is_reached(guest, WEB6), await is_reached(guest, OTHER6)) == expected, policy


async def test_what_the_node_denies_is_denied_in_ipv6(
    host: NetHost, slots: Slots, slot: Slot, guest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in (PRIVATE6, MAPPED6):
        host.listen(host.internet, address, 80, saying(b"secret"))
    service = host.listen(None, "::", 0, saying(b"secret"))
    other = await slots.acquire("other")
    host.listen(with_ipv6(host.guest(other), monkeypatch), GUEST_ADDRESS6, 80, saying(b"secret"))
    everything = parse({"denyOut": ALL, "allowOut": ["::/0", "fc00::/7"]}, None)
    for policy in (Policy(), everything):
        await slots.apply(slot, policy)
        assert not await is_reached(guest, PRIVATE6)
        assert not await is_reached(guest, MAPPED6)
        assert not await is_reached(guest, HOST6, service)
        assert not await is_reached(guest, GATEWAY_ADDRESS6, service)
        assert not await is_reached(guest, str(slots.identity.slot_address6(other.index)))
        assert not await is_reached(guest, str(slots.identity.slot_address6(4000)))


async def test_a_name_opens_its_ipv6_addresses(host: NetHost, slots: Slots, slot: Slot, guest: Path) -> None:
    for address in (WEB6, OTHER6):
        host.listen(host.internet, address, 80, saying(b"public"))
    zone = Zone(host.internet, NAMES)
    resolver = Resolver(str(slots.identity.address), Upstreams([NAMES]), slots)
    await resolver.start()
    try:
        zone.put("allowed.test", f"allowed.test 60 AAAA {WEB6}")
        await slots.apply(slot, parse({"denyOut": ALL, "allowOut": ["allowed.test"]}, None))
        assert not await is_reached(guest, WEB6)
        with datagram(guest) as asking:
            asking.connect((GATEWAY_ADDRESS, 53))
            asking.send(dns.message.make_query("allowed.test", "AAAA").to_wire())
            answer = dns.message.from_wire(await asyncio.to_thread(asking.recv, 4096))
        assert [record.address for record in answer.answer[0]] == [WEB6]
        assert await is_reached(guest, WEB6)
        assert not await is_reached(guest, OTHER6)
    finally:
        await resolver.stop()
        zone.close()


async def test_a_change_of_rules_cuts_flows_of_ipv6(
    host: NetHost, slots: Slots, slot: Slot, guest: Path
) -> None:
    def echo(connection: socket.socket) -> None:
        connection.settimeout(1)  # it never hears of the end
        try:
            while data := connection.recv(100):
                connection.sendall(data)
        except OSError:
            pass

    host.listen(host.internet, WEB6, 80, echo)
    with await asyncio.to_thread(connect, guest, WEB6, 80) as flow:
        flow.sendall(b"one")
        assert await asyncio.to_thread(flow.recv, 100) == b"one"
        await slots.apply(slot, parse({"denyOut": [WEB6]}, None))
        flow.sendall(b"two")
        with pytest.raises(OSError):
            await asyncio.to_thread(flow.recv, 100)


async def test_a_forged_source_goes_nowhere_in_ipv6(host: NetHost, slots: Slots, guest: Path) -> None:
    with namespace.inside(host.internet):
        sink = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    with namespace.inside(guest):
        honest, forging = (socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) for _ in range(2))
        run("ip", "addr", "add", "2001:db8:9::9/128", "dev", "lo", "nodad")
    with sink, honest, forging:
        sink.bind((WEB6, 9))
        sink.settimeout(5)
        forging.bind(("2001:db8:9::9", 0))
        forging.sendto(b"forged", (WEB6, 9))
        honest.sendto(b"honest", (WEB6, 9))
        assert await asyncio.to_thread(sink.recv, 100) == b"honest"


async def test_the_host_is_afterwards_as_it_was_in_ipv6(host: NetHost) -> None:
    def state() -> dict[str, str]:
        switches = {
            str(file): file.read_text()
            for name in ("forwarding", "force_forwarding", "accept_ra", "disable_ipv6")
            for file in sorted(Path("/proc/sys/net/ipv6/conf").glob(f"*/{name}"))
        }
        return {"addr": run("ip", "-6", "addr"), "routes": run("ip", "-6", "route"), **switches}

    before = state()
    slots = NetNode(host).slots()
    await slots.start()
    slot = await slots.acquire("machine")
    switches = state()
    assert switches["/proc/sys/net/ipv6/conf/all/forwarding"] == "0\n"
    assert switches["/proc/sys/net/ipv6/conf/eth0/force_forwarding"] == "1\n"
    await slots.release(slot)
    await slots.stop()
    assert state() == before


async def test_it_is_off_by_the_setting_and_without_a_way_out(host: NetHost) -> None:
    off = NetNode(host, ipv6="off").slots()
    await off.start()
    slot = await off.acquire("machine")
    with namespace.inside(slot.namespace):
        assert run("ip", "-6", "addr") == ""
    assert not off.ipv6
    await off.release(slot)
    await off.stop()
    assert forwarding.ipv6_for_guests("auto")
    run("ip", "-6", "route", "del", "default")
    assert not forwarding.ipv6_for_guests("auto")
    assert forwarding.ipv6_for_guests("on")


def test_ways_out_are_all_that_lead_anywhere(host: NetHost) -> None:
    run("ip", "link", "add", "dmz0", "type", "veth", "peer", "name", "dmz1")
    for device in ("dmz0", "dmz1"):  # the latter with a link-local address alone
        run("ip", "link", "set", device, "up")
    run("ip", "addr", "add", "2001:db8:5::1/64", "dev", "dmz0", "nodad")
    assert forwarding.ipv6_uplinks() == ["dmz0", "eth0"]


def test_an_address_of_the_hosts_own_network_is_no_way_out(host: NetHost) -> None:
    run("ip", "addr", "del", f"{HOST6}/64", "dev", "eth0")
    run("ip", "addr", "add", "fd00::2/64", "dev", "eth0", "nodad")
    run("ip", "-6", "route", "replace", "default", "via", "fd00::1")
    assert not forwarding.ipv6_for_guests("auto")


def test_a_host_that_cannot_forward_is_told(host: NetHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "IPV6", forwarding.IPV6._replace(switch="no_such_switch"))
    assert not forwarding.ipv6_for_guests("auto")
    with pytest.raises(HostIncapable, match="does not forward"):
        forwarding.ipv6_for_guests("on")


async def test_a_slot_of_before_gets_it_when_it_is_adopted(
    host: NetHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = NetNode(host, ipv6="off")
    slots = before.slots()
    await slots.start()
    slot = await slots.acquire("machine")
    guest = host.guest(slot)
    await slots.stop()
    host.listen(host.internet, WEB6, 80, saying(b"public"))
    again = NetNode(host).slots()
    await again.start()
    adopted = await again.adopt("machine")
    assert adopted is not None and adopted.address == slot.address
    assert await reached(with_ipv6(guest, monkeypatch), WEB6, 80) == b"public"
    await refusal(guest, WEB6, 81)
    await again.reap(set())
    await again.stop()
