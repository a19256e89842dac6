"""Names and what they open, packet by packet: slots of a stand-in host, and an internet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path

import dns.message
import dns.rcode
import pytest

from agentenv.network import namespace
from agentenv.network.policy import UNRESTRICTED, Policy, parse
from agentenv.network.resolver import Resolver
from agentenv.network.slot import GATEWAY_ADDRESS, Slot
from agentenv.network.slots import Slots
from agentenv.network.upstreams import Upstreams
from support.nethost import (
    METADATA,
    NAMES,
    PRIVATE,
    WEB,
    NetHost,
    connect,
    datagram,
    reached,
    refusal,
    run,
    saying,
)
from support.zone import Zone

pytestmark = pytest.mark.machine

OTHER = "192.0.2.80"  # a second public server
ALL = ["0.0.0.0/0"]


def named(*names: str, **more: list[str]) -> Policy:
    return parse({"allowOut": list(names), "denyOut": ALL, **more}, None)


@pytest.fixture
def host(host: NetHost) -> NetHost:
    with namespace.inside(host.internet):
        run("ip", "addr", "add", f"{OTHER}/32", "dev", "lo")
    for address in (WEB, OTHER, PRIVATE, METADATA):
        host.listen(host.internet, address, 80, saying(address.encode()))
    return host


@pytest.fixture
def zone(host: NetHost) -> Iterator[Zone]:
    made = Zone(host.internet, NAMES)
    made.put("allowed.test", f"allowed.test 300 A {WEB}")
    made.put("other.test", f"other.test 300 A {OTHER}")
    yield made
    made.close()


@pytest.fixture
async def resolver(slots: Slots, zone: Zone) -> AsyncIterator[Resolver]:
    made = Resolver(str(slots.identity.address), Upstreams([NAMES]), slots, rounds=(1.0,))
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def slot(slots: Slots, resolver: Resolver) -> Slot:
    return await slots.acquire("machine")


@pytest.fixture
def guest(host: NetHost, slot: Slot) -> Path:
    return host.guest(slot)


async def looked_up(
    guest: Path, name: str, *, server: str = GATEWAY_ADDRESS, rdtype: str = "A"
) -> list[str] | dns.rcode.Rcode:
    """The addresses that a guest is told, or the code of the refusal."""
    question = dns.message.make_query(name, rdtype)
    with datagram(guest) as asking:
        asking.connect((server, 53))
        asking.send(question.to_wire())
        answer = dns.message.from_wire(await asyncio.to_thread(asking.recv, 65535))
    if answer.rcode() != dns.rcode.NOERROR:
        return answer.rcode()
    return [record.address for each in answer.answer if each.rdtype in (1, 28) for record in each]


async def test_a_name_opens_what_it_resolves_to_and_nothing_else(
    slots: Slots, slot: Slot, guest: Path, zone: Zone, resolver: Resolver
) -> None:
    await slots.apply(slot, named("allowed.test"))
    await refusal(guest, WEB, 80)
    assert await looked_up(guest, "allowed.test") == [WEB]
    assert await reached(guest, WEB, 80) == WEB.encode()
    await refusal(guest, OTHER, 80)
    assert await looked_up(guest, "other.test") == dns.rcode.NXDOMAIN
    await refusal(guest, OTHER, 80)
    assert [name for name, _, _ in zone.asked] == ["allowed.test"]
    assert [each.name for each in resolver.refusals.of("machine")] == ["other.test"]


async def test_it_is_open_whenever_the_answer_is_there(
    slots: Slots, slot: Slot, guest: Path, zone: Zone
) -> None:
    """The first packet of a client that connects at once is let pass: it is not sent again in this time."""
    await slots.apply(slot, named("*.many.test"))
    for number in range(20):
        zone.put(f"n{number}.many.test", f"n{number}.many.test 300 A {WEB}")
        assert await looked_up(guest, f"n{number}.many.test") == [WEB]
        assert await reached(guest, WEB, 80) == WEB.encode()
        await slots.apply(slot, Policy(internet=False))
        await refusal(guest, WEB, 80)
        await slots.apply(slot, named("*.many.test"))


@pytest.mark.parametrize("address", [PRIVATE, METADATA])
async def test_an_allowed_name_does_not_open_what_the_node_denies(
    slots: Slots, slot: Slot, guest: Path, zone: Zone, address: str
) -> None:
    zone.put("allowed.test", f"allowed.test 300 A {address}")
    await slots.apply(slot, named("allowed.test"))
    assert await looked_up(guest, "allowed.test") == [address]
    await refusal(guest, address, 80)


async def test_an_answer_that_ends_closes_what_it_opened_but_not_flows(
    slots: Slots, slot: Slot, guest: Path, zone: Zone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.network.lookups.OPEN_AT_LEAST_S", 1)
    zone.put("allowed.test", f"allowed.test 1 A {WEB}")
    await slots.apply(slot, named("allowed.test"))
    assert await looked_up(guest, "allowed.test") == [WEB]
    flow = await asyncio.to_thread(connect, guest, WEB, 80)
    with flow:
        while await asyncio.to_thread(is_open, guest, WEB):
            await asyncio.sleep(0.05)
        flow.sendall(b"?")
        assert await asyncio.to_thread(flow.recv, 100) == WEB.encode()


def is_open(guest: Path, address: str) -> bool:
    try:
        connect(guest, address, 80).close()
    except OSError:
        return False
    return True


async def test_an_answer_on_its_way_when_the_rules_change_opens_nothing(
    slots: Slots, slot: Slot, guest: Path, zone: Zone, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    proper: Callable[[bytes, str], bytes] = zone.answer

    def answer(asked: bytes, transport: str) -> bytes:
        change = slots.apply(slot, named("other.test"))
        asyncio.run_coroutine_threadsafe(change, loop).result(10)
        return proper(asked, transport)

    await slots.apply(slot, named("allowed.test"))
    monkeypatch.setattr(zone, "answer", answer)
    assert await looked_up(guest, "allowed.test") == dns.rcode.SERVFAIL
    monkeypatch.setattr(zone, "answer", proper)
    await refusal(guest, WEB, 80)
    assert await looked_up(guest, "other.test") == [OTHER]
    assert await reached(guest, OTHER, 80) == OTHER.encode()


async def test_the_next_sandbox_of_a_slot_finds_nothing_open(
    host: NetHost, slots: Slots, slot: Slot, guest: Path
) -> None:
    await slots.apply(slot, named("allowed.test"))
    assert await looked_up(guest, "allowed.test") == [WEB]
    await slots.release(slot)
    again = await slots.acquire("next")
    assert again.address == slot.address
    await slots.apply(again, named("allowed.test"))
    other = host.guest(again)
    await refusal(other, WEB, 80)
    assert await looked_up(other, "allowed.test") == [WEB]
    assert await reached(other, WEB, 80) == WEB.encode()


async def test_nothing_is_asked_of_other_servers_under_names(
    host: NetHost, slots: Slots, slot: Slot, guest: Path, zone: Zone
) -> None:
    await slots.apply(slot, named("allowed.test", OTHER, NAMES))
    with datagram(guest, timeout=0.5) as asking:
        asking.connect((NAMES, 53))
        asking.send(dns.message.make_query("other.test", "A").to_wire())
        with pytest.raises(OSError):
            asking.recv(1000)
    assert zone.asked == []


async def test_a_sandboxs_own_servers_are_asked_by_the_node(
    host: NetHost, slots: Slots, slot: Slot, guest: Path, zone: Zone
) -> None:
    with namespace.inside(host.internet):
        run("ip", "addr", "add", "192.0.2.54/32", "dev", "lo")
    own = Zone(host.internet, "192.0.2.54")
    try:
        own.put("allowed.test", f"allowed.test 300 A {OTHER}")
        await slots.apply(slot, named("allowed.test", dnsServers=["192.0.2.54"]))
        assert await looked_up(guest, "allowed.test") == [OTHER]
        await slots.apply(slot, Policy(dns_servers=(IPv4Address("192.0.2.54"),)))
        assert await looked_up(guest, "allowed.test") == [OTHER]
        await slots.apply(slot, UNRESTRICTED)
        assert await looked_up(guest, "allowed.test") == [WEB]
        assert len(own.asked) == 2 and len(zone.asked) == 1
    finally:
        own.close()


async def test_servers_of_the_nodes_own_network_are_not_asked(
    host: NetHost, slots: Slots, slot: Slot, guest: Path, zone: Zone
) -> None:
    inner = Zone(host.internet, PRIVATE)
    try:
        inner.put("allowed.test", f"allowed.test 300 A {OTHER}")
        policy = named("allowed.test", dnsServers=[PRIVATE])
        await slots.apply(slot, policy)
        assert await looked_up(guest, "allowed.test") == dns.rcode.NXDOMAIN
        assert inner.asked == zone.asked == []
    finally:
        inner.close()


async def test_many_guests_with_names_of_their_own(
    host: NetHost, slots: Slots, zone: Zone, resolver: Resolver
) -> None:
    """Sixteen guests ask at the same time for each other's names: each gets its own, and reaches that."""
    made = [await slots.acquire(f"machine-{number}") for number in range(16)]
    guests = [host.guest(slot) for slot in made]
    for number, slot in enumerate(made):
        address = (WEB, OTHER)[number % 2]
        zone.put(f"n{number}.test", f"n{number}.test 300 A {address}")
        await slots.apply(slot, named(f"n{number}.test"))

    async def lives(number: int) -> None:
        guest, own, others = guests[number], (WEB, OTHER)[number % 2], (OTHER, WEB)[number % 2]
        assert await looked_up(guest, f"n{(number + 1) % 16}.test") == dns.rcode.NXDOMAIN
        assert await looked_up(guest, f"n{number}.test") == [own]
        assert await reached(guest, own, 80) == own.encode()
        await refusal(guest, others, 80)

    await asyncio.gather(*map(lives, range(16)))
    assert sorted(name for name, _, _ in zone.asked) == sorted(f"n{number}.test" for number in range(16))
