"""Slots in a real kernel, on a stand-in host; processes in namespaces stand for the guests."""

from __future__ import annotations

import asyncio
import collections
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.errors import CapacityExceeded, HostFault, HostIncapable
from agentenv.network import namespace
from agentenv.network.host import forward_blockers
from agentenv.network.resolver import Resolver
from agentenv.network.slot import GATEWAY_ADDRESS, Slot
from agentenv.network.slots import Slots
from agentenv.network.upstreams import Upstreams
from support import dns
from support.nethost import (
    HOST,
    METADATA,
    NAMES,
    PRIVATE,
    UPLINK_MTU,
    WEB,
    NetHost,
    NetNode,
    connect,
    datagram,
    exchange,
    peer,
    reached,
    refusal,
    run,
    saying,
)

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are made by root"),
]

STEPS = ("namespace", "sysctls", "tap", "veth", "host", "addresses", "rules")


# The life of slots


async def test_the_host_is_afterwards_as_it_was_before(host: NetHost, net: NetNode) -> None:
    before = host.state()
    slots = net.slots()
    await slots.start()
    made = [await slots.acquire(f"machine-{number}") for number in range(3)]
    assert [slot.name for slot in made] == ["aenv0-1", "aenv0-2", "aenv0-3"]
    assert [slot.address for slot in made] == ["10.192.1.1", "10.192.1.2", "10.192.1.3"]
    assert [slot.uid for slot in made] == [1_900_000_001, 1_900_000_002, 1_900_000_003]
    assert host.state() != before
    for slot in made:
        await slots.release(slot)
    await slots.stop()
    assert host.state() == before
    assert net.ledger.entries() == []
    assert sorted(file.name for file in (host.directory / "nodes").iterdir()) == ["lock"]


async def test_the_tap_belongs_to_the_machines_user(slots: Slots) -> None:
    slot = await slots.acquire("machine")
    with namespace.inside(slot.namespace):
        shown = run("ip", "-d", "link", "show", "tap0")
    assert f"user {slot.uid}" in shown
    for fact in ("type tap", "pi off", "vnet_hdr on", "persist on"):
        assert fact in shown
    assert "multi_queue on" not in shown


async def test_a_burst_gets_what_there_is_and_typed_refusals(host: NetHost, net: NetNode) -> None:
    slots = net.slots(capacity=10)
    await slots.start()
    results = await asyncio.gather(
        *(slots.acquire(f"machine-{number}") for number in range(50)), return_exceptions=True
    )
    kinds = collections.Counter(type(result) for result in results)
    assert kinds == {Slot: 10, CapacityExceeded: 40}
    made = [result for result in results if isinstance(result, Slot)]
    assert {slot.index for slot in made} == set(range(1, 11))
    assert slots.free == 0
    await asyncio.gather(*map(slots.release, made))
    assert slots.free == 10
    await slots.stop()


async def test_numbers_come_back_lowest_first_and_an_old_lease_releases_nothing(
    host: NetHost, slots: Slots
) -> None:
    first, second, _ = [await slots.acquire(f"machine-{number}") for number in range(3)]
    await slots.release(second)
    await slots.release(first)
    again = await slots.acquire("next")
    assert (again.index, again.address) == (first.index, first.address)
    assert again.lease != first.lease
    await slots.release(first)
    assert again.namespace.exists()
    assert slots.owner_at(again.address) == "next"
    assert slots.owner_at(second.address) is None
    assert slots.owner_at(HOST) is None


async def test_releases_at_the_same_time_are_one(slots: Slots, net: NetNode) -> None:
    slot = await slots.acquire("machine")
    await asyncio.gather(*(slots.release(slot) for _ in range(5)))
    assert net.ledger.entries(kind="slot") == []
    assert not slot.namespace.exists()


@pytest.mark.parametrize("step", STEPS)
async def test_a_failure_at_any_step_leaves_nothing(host: NetHost, net: NetNode, step: str) -> None:
    failing = True

    def fail(name: str) -> None:
        if failing and name == step:
            raise OSError(28, "injected")

    slots = net.slots(step=fail)
    await slots.start()
    before, free = host.state(), slots.free
    for _ in range(15):
        with pytest.raises(HostFault, match="injected"):
            await slots.acquire("machine")
    assert slots.free == free
    assert net.ledger.entries(kind="slot") == []
    assert host.state() == before
    failing = False
    slot = await slots.acquire("machine")
    assert slot.index == 1
    await slots.release(slot)
    await slots.stop()


@pytest.mark.soak
async def test_a_hundred_failures_at_each_step_leave_nothing(host: NetHost, net: NetNode) -> None:
    wanted = [step for step in STEPS for _ in range(100)]
    random.Random(7).shuffle(wanted)
    current = ""

    def fail(name: str) -> None:
        if name == current:
            raise OSError(28, "injected")

    slots = net.slots(step=fail)
    await slots.start()
    before, free = host.state(), slots.free
    for current in wanted:  # noqa: B007 (the closure reads it)
        with pytest.raises(HostFault, match="injected"):
            await slots.acquire("machine")
    assert slots.free == free
    assert host.state() == before
    await slots.stop()


async def test_a_cancelled_caller_leaves_nothing(host: NetHost, slots: Slots) -> None:
    before = host.state()
    for turns in range(12):
        task = asyncio.create_task(slots.acquire("machine"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    slot = await slots.acquire("last")  # behind the others, since they take turns
    await slots.release(slot)
    while slots.free < node_capacity(slots):
        await asyncio.sleep(0.01)
    assert host.state() == before


def node_capacity(slots: Slots) -> int:
    return slots._capacity


async def test_what_has_a_slots_name_already_is_left_alone(host: NetHost, slots: Slots) -> None:
    stranger = host.namespaces / "aenv0-1"
    stranger.write_text("mine")
    slot = await slots.acquire("machine")
    assert slot.name == "aenv0-2"
    assert stranger.read_text() == "mine"


# Restarts


async def test_a_restarted_node_adopts_its_slots_and_reaps_the_rest(host: NetHost, net: NetNode) -> None:
    before = host.state()
    old = net.slots()
    await old.start()
    kept, dropped = await old.acquire("kept"), await old.acquire("dropped")
    guest = host.guest(kept)
    host.listen(host.internet, WEB, 80, saying(b"hello"))
    await old.stop()  # slots exist, so the host stays as it is
    assert await reached(guest, WEB, 80) == b"hello"

    new = net.slots()
    await new.start()
    assert await new.adopt("nobody") is None
    assert await new.adopt("kept") == kept
    assert await new.reap({"kept"}) == [dropped.name]
    assert not dropped.namespace.exists()
    assert await reached(guest, WEB, 80) == b"hello"
    await new.release(kept)
    await new.stop()
    assert host.state() == before


@pytest.mark.parametrize(
    "damage",
    [
        "ip link del aenv0-1",
        "ip link set aenv0-1 down",
        "ip route del 10.192.1.1",
        "nft delete table inet aenv0",
        "nsenter --net={ns} nft flush ruleset",
        "nsenter --net={ns} ip addr flush dev uplink",
        "nsenter --net={ns} ip link set tap0 down",
        "nsenter --net={ns} sysctl -q net.ipv4.ip_forward=0",
        "sysctl -q net.ipv4.conf.eth0.forwarding=0",
    ],
)
async def test_what_is_missing_of_a_slot_is_put_in_order(host: NetHost, net: NetNode, damage: str) -> None:
    old = net.slots()
    await old.start()
    slot = await old.acquire("machine")
    guest = host.guest(slot)
    host.listen(host.internet, WEB, 80, saying(b"hello"))
    await old.stop()
    subprocess.run(damage.format(ns=slot.namespace).split(), check=True)

    new = net.slots()
    await new.start()
    assert await new.adopt("machine") == slot
    assert await reached(guest, WEB, 80) == b"hello"
    await new.release(slot)
    await new.stop()


@pytest.mark.parametrize("loss", ["umount {ns}", "nsenter --net={ns} ip link del tap0"])
async def test_a_slot_that_cannot_be_mended_is_removed(host: NetHost, net: NetNode, loss: str) -> None:
    before = host.state()
    old = net.slots()
    await old.start()
    slot = await old.acquire("machine")
    await old.stop()
    subprocess.run(loss.format(ns=slot.namespace).split(), check=True)
    new = net.slots()
    await new.start()
    assert await new.adopt("machine") is None
    await new.stop()
    assert host.state() == before


CRASHING = """
import asyncio, os, signal, sys
from pathlib import Path
from agentenv.config import Settings
from agentenv.network import namespace
from agentenv.network.node import NodeRegistry
from agentenv.network.slots import Slots
from agentenv.network.upstreams import Upstreams
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger

home, namespaces, registry, fatal = sys.argv[1:]
namespace.NAMESPACES = Path(namespaces)

def step(name):
    if name == fatal:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    ledger = Ledger(Database(Path(home) / "aenv.db"))
    slots = Slots(Settings(home=home), ledger, registry=NodeRegistry(Path(registry)), step=step)
    await slots.start()
    await slots.acquire("machine")

asyncio.run(main())
"""


@pytest.mark.parametrize("step", STEPS)
async def test_what_a_killed_node_left_at_any_step_is_reaped(host: NetHost, net: NetNode, step: str) -> None:
    before = host.state()
    arguments = [str(net.home), str(host.namespaces), str(host.directory / "nodes"), step]
    killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", CRASHING, *arguments])
    assert killed.returncode == -signal.SIGKILL
    assert [entry.owner for entry in net.ledger.entries(kind="slot")] == ["machine"]
    slots = net.slots()
    await slots.start()
    assert await slots.reap(set()) == ["aenv0-1"]
    await slots.stop()
    assert host.state() == before


async def test_a_lost_claim_file_is_made_again_with_the_same_index(host: NetHost, net: NetNode) -> None:
    other = NetNode(host, "other").slots()
    await other.start()
    slots = net.slots()
    await slots.start()
    slot = await slots.acquire("machine")
    await slots.stop()
    await other.stop()
    (host.directory / "nodes" / "1").unlink()
    await slots.start()
    assert slots.identity.index == 1
    assert await slots.adopt("machine") == slot
    await slots.release(slot)
    await slots.stop()


async def test_a_start_that_fails_leaves_nothing(
    host: NetHost, net: NetNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = host.state()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(HostIncapable, match="nftables"):
            await net.slots().start()
    assert host.state() == before
    assert not (host.directory / "nodes" / "0").exists()


async def test_slots_of_an_earlier_boot_are_forgotten(host: NetHost, net: NetNode) -> None:
    slots = net.slots()
    await slots.start()
    await slots.acquire("machine")
    await slots.stop()
    with net.database.transaction() as cursor:
        cursor.execute("UPDATE resources SET boot_id = 'another'")
    await slots.start()
    assert await slots.adopt("machine") is None
    assert net.ledger.entries(kind="slot") == []
    await slots.stop()


# Nodes side by side


async def test_two_nodes_have_their_own_and_the_last_restores_forwarding(host: NetHost) -> None:
    before = host.state()
    nodes = [NetNode(host, name) for name in ("one", "two")]
    one, two = [node.slots() for node in nodes]
    await one.start()
    await two.start()
    assert [one.identity.index, two.identity.index] == [0, 1]
    first, second = await one.acquire("a"), await two.acquire("b")
    assert (first.address, second.address) == ("10.192.1.1", "10.192.65.1")
    port = host.listen(host.guest(second), "0.0.0.0", 0, saying(b"private"))
    guest = host.guest(first)
    assert not isinstance(await refusal(guest, second.address, port), TimeoutError)
    await one.release(first)
    await one.stop()
    assert Path("/proc/sys/net/ipv4/conf/eth0/forwarding").read_text() == "1\n"
    assert await reached(None, second.address, port) == b"private"
    await two.release(second)
    await two.stop()
    assert host.state() == before


async def test_a_block_that_the_host_uses_is_not_taken(host: NetHost, net: NetNode) -> None:
    run("ip", "addr", "add", "10.192.5.1/24", "dev", "eth0")
    run("ip", "route", "add", "10.192.64.0/20", "via", "198.51.100.1")
    slots = net.slots()
    await slots.start()
    assert str(slots.identity.block) == "10.192.128.0/18"
    await slots.stop()
    run("ip", "route", "add", "10.0.0.0/8", "via", "198.51.100.1")
    with pytest.raises(HostFault, match=r"10\.0\.0\.0/8.*network_range"):
        await net.slots().start()


async def test_forwarding_that_was_on_stays_on(host: NetHost, net: NetNode) -> None:
    run("sysctl", "-q", "net.ipv4.ip_forward=1")
    before = host.state()
    slots = net.slots()
    await slots.start()
    await slots.stop()
    assert host.state() == before


async def test_dockers_chain_lets_guests_pass_and_is_left_as_it_was(host: NetHost, net: NetNode) -> None:
    for rule in (
        "-P FORWARD DROP",
        "-N DOCKER-USER",
        "-A FORWARD -j DOCKER-USER",
        "-A DOCKER-USER -j RETURN",
    ):
        run("iptables", *rule.split())
    before = host.state()
    host.listen(host.internet, WEB, 80, saying(b"hello"))
    slots = net.slots()
    await slots.start()
    slot = await slots.acquire("machine")
    assert await reached(host.guest(slot), WEB, 80) == b"hello"
    assert forward_blockers() == []
    await slots.release(slot)
    await slots.stop()
    assert host.state()["rules"] == before["rules"]
    run("iptables", "-D", "FORWARD", "-j", "DOCKER-USER")
    run("iptables", "-F", "DOCKER-USER")
    run("iptables", "-X", "DOCKER-USER")
    (blocker,) = forward_blockers()
    assert "ip filter FORWARD" in blocker


# What a guest reaches, and who reaches it


@pytest.fixture
async def resolver(host: NetHost, slots: Slots) -> AsyncIterator[dns.Upstream]:
    upstream = dns.Upstream(host.internet, NAMES)
    host.stack.callback(upstream.close)
    made = Resolver(str(slots.identity.address), Upstreams([NAMES]), slots)
    await made.start()
    yield upstream
    await made.stop()


async def test_a_guest_fetches_large_bodies_through_the_smaller_mtu(host: NetHost, slots: Slots) -> None:
    body = random.Random(1).randbytes(400_000)
    host.listen(host.internet, WEB, 80, saying(body))
    guest = host.guest(await slots.acquire("machine"))
    assert await reached(guest, WEB, 80) == body


async def test_the_world_sees_the_host_and_not_the_slot(host: NetHost, slots: Slots) -> None:
    host.listen(host.internet, WEB, 80, peer)
    guest = host.guest(await slots.acquire("machine"))
    assert await reached(guest, WEB, 80) == HOST.encode()


async def test_segments_fit_the_uplink_in_both_directions(host: NetHost, slots: Slots) -> None:
    def largest(connection: socket.socket) -> None:
        connection.recv(1)
        connection.sendall(str(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)).encode())

    host.listen(host.internet, WEB, 80, largest)
    guest = host.guest(await slots.acquire("machine"))
    connection = await asyncio.to_thread(connect, guest, WEB, 80)
    inwards = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    outwards = int(await exchange(connection))
    assert max(inwards, outwards) <= UPLINK_MTU - 40


async def test_the_host_reaches_a_guest_and_is_seen_as_its_gateway(host: NetHost, slots: Slots) -> None:
    slot = await slots.acquire("machine")
    port = host.listen(host.guest(slot), "0.0.0.0", 0, peer)
    assert await reached(None, slot.address, port) == GATEWAY_ADDRESS.encode()


async def test_names_are_resolved_over_datagrams_and_streams(
    host: NetHost, slots: Slots, resolver: dns.Upstream
) -> None:
    guest = host.guest(await slots.acquire("machine"))
    question = dns.question("example.com")
    with datagram(guest) as asking:
        asking.connect((GATEWAY_ADDRESS, 53))
        asking.send(question)
        answer = await asyncio.to_thread(asking.recv, 4096)
    assert dns.addresses(answer) == ["192.0.2.77"]
    assert answer[:2] == question[:2]
    stream = await asyncio.to_thread(connect, guest, GATEWAY_ADDRESS, 53)
    with stream:
        stream.sendall(len(question).to_bytes(2, "big") + question)
        assert dns.addresses((await asyncio.to_thread(stream.recv, 4096))[2:]) == ["192.0.2.77"]
    assert resolver.transports == ["udp", "tcp"]


async def test_denied_ranges_and_the_host_are_refused_at_once(host: NetHost, slots: Slots) -> None:
    for address in (PRIVATE, METADATA):
        host.listen(host.internet, address, 80, saying(b"secret"))
    service = host.listen(None, "0.0.0.0", 0, saying(b"secret"))
    assert await reached(None, PRIVATE, 80) == b"secret"
    guest = host.guest(await slots.acquire("machine"))
    for address, port in (
        (PRIVATE, 80),
        (METADATA, 80),
        (HOST, service),
        (str(slots.identity.address), service),
        (GATEWAY_ADDRESS, service),
    ):
        assert not isinstance(await refusal(guest, address, port), TimeoutError)


async def test_only_the_ranges_in_the_settings_are_denied(host: NetHost) -> None:
    host.listen(host.internet, PRIVATE, 80, saying(b"intranet"))
    host.listen(host.internet, WEB, 80, saying(b"web"))
    slots = NetNode(host, denied_ranges=["203.0.113.0/24"]).slots()
    await slots.start()
    slot = await slots.acquire("machine")
    guest = host.guest(slot)
    assert await reached(guest, PRIVATE, 80) == b"intranet"
    await refusal(guest, WEB, 80)
    await slots.release(slot)
    await slots.stop()


async def test_sandboxes_do_not_reach_each_other_or_the_host_whatever_is_denied(host: NetHost) -> None:
    slots = NetNode(host, denied_ranges=[]).slots()
    await slots.start()
    one, two = await slots.acquire("a"), await slots.acquire("b")
    guest, other = host.guest(one), host.guest(two)
    port = host.listen(other, "0.0.0.0", 0, saying(b"private"))
    service = host.listen(None, "0.0.0.0", 0, saying(b"private"))
    assert await reached(None, two.address, port) == b"private"
    assert not isinstance(await refusal(guest, two.address, port), TimeoutError)
    assert not isinstance(await refusal(guest, HOST, service), TimeoutError)
    await slots.reap(set())
    await slots.stop()


async def test_the_world_does_not_reach_a_guest(host: NetHost, slots: Slots) -> None:
    slot = await slots.acquire("machine")
    port = host.listen(host.guest(slot), "0.0.0.0", 0, saying(b"private"))
    with namespace.inside(host.internet):
        run("ip", "route", "add", slot.address, "via", HOST)
    await refusal(host.internet, slot.address, port)


async def test_a_forged_source_goes_nowhere(host: NetHost, slots: Slots) -> None:
    slot = await slots.acquire("machine")
    guest = host.guest(slot)
    with namespace.inside(host.internet):
        sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sink, datagram(guest) as honest, datagram(guest) as forging:
        sink.bind((WEB, 9))
        sink.settimeout(5)
        with namespace.inside(guest):
            run("ip", "addr", "add", "198.18.0.9/32", "dev", "lo")
        forging.bind(("198.18.0.9", 0))
        forging.sendto(b"forged", (WEB, 9))
        honest.sendto(b"honest", (WEB, 9))
        assert await asyncio.to_thread(sink.recv, 100) == b"honest"
        forging.sendto(b"forged", (WEB, 9))
        honest.sendto(b"honest", (WEB, 9))
        assert await asyncio.to_thread(sink.recv, 100) == b"honest"


async def test_flows_of_an_earlier_lease_do_not_reach_the_next(host: NetHost, slots: Slots) -> None:
    first = await slots.acquire("first")
    with namespace.inside(host.internet):
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with server:
        server.bind((WEB, 7))
        server.settimeout(5)
        with datagram(host.guest(first)) as client:
            client.bind(("0.0.0.0", 4000))
            client.sendto(b"hello", (WEB, 7))
            _, source = await asyncio.to_thread(server.recvfrom, 100)
            server.sendto(b"answer", source)
            assert await asyncio.to_thread(client.recv, 100) == b"answer"
        await slots.release(first)
        second = await slots.acquire("second")
        assert second.address == first.address
        with datagram(host.guest(second)) as other:
            other.bind(("0.0.0.0", 4000))
            server.sendto(b"late", source)  # the host still translates this to the slot's address
            marker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            with marker:
                marker.sendto(b"marker", (second.address, 4000))
            assert await asyncio.to_thread(other.recv, 100) == b"marker"


async def test_ipv6_is_off_in_a_slot(slots: Slots) -> None:
    slot = await slots.acquire("machine")
    with namespace.inside(slot.namespace):
        assert run("ip", "-6", "addr") == ""
    assert "inet6" not in run("ip", "addr", "show", "dev", slot.name)
