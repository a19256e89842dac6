"""Limits on a slot's traffic in a real kernel: each way, changed, lifted, and gone with the slot."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest

from agentenv.errors import HostFault
from agentenv.limits import BURST_MOST, MOST, NetworkLimits
from agentenv.network import namespace
from agentenv.network.slot import Slot
from agentenv.network.slots import Slots
from support.nethost import WEB, NetHost, connect, run

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are made by root"),
]

KIB, MIB = 1 << 10, 1 << 20
RATE, BURST = MIB, 64 * KIB


def disciplines(slot: Slot) -> str:
    with namespace.inside(slot.namespace):
        return run("tc", "qdisc", "show")


def server(host: NetHost) -> int:
    """Takes what comes, or sends as many bytes as the first line asks for; ends with one byte."""

    def answer(connection: socket.socket) -> None:
        with connection.makefile("rb") as file:
            size = int(file.readline())
            connection.sendall(bytes(size))
            while file.read(64 * KIB):
                pass
        connection.sendall(b".")

    return host.listen(host.internet, WEB, 0, answer)


def moved(place: Path, port: int, receive: int, send: int) -> float:
    """Seconds until the server has had and sent that many bytes."""
    with connect(place, WEB, port) as connection:
        connection.settimeout(30)
        started = time.monotonic()
        connection.sendall(b"%d\n" % receive + bytes(send))
        connection.shutdown(socket.SHUT_WR)
        left = receive + 1
        while data := connection.recv(min(left, 64 * KIB)):
            left -= len(data)
        assert left == 0
        return time.monotonic() - started


async def test_each_way_has_its_own_limit(host: NetHost, slots: Slots) -> None:
    slot = await slots.acquire("one")
    assert "tbf" not in disciplines(slot)  # what is not limited costs nothing
    guest, port = host.guest(slot), server(host)
    least = (MIB - BURST) / RATE  # by the bucket's own arithmetic
    await slots.limit(slot, NetworkLimits(rx_bytes_per_second=RATE, burst_bytes=BURST))
    assert await asyncio.to_thread(moved, guest, port, MIB, 0) >= least
    await slots.limit(slot, NetworkLimits(tx_bytes_per_second=RATE, burst_bytes=BURST))
    assert await asyncio.to_thread(moved, guest, port, 0, MIB) >= least
    await slots.limit(slot, NetworkLimits())
    assert "tbf" not in disciplines(slot)
    await asyncio.to_thread(moved, guest, port, 4 * MIB, 0)


async def test_the_node_itself_is_limited_too(host: NetHost, slots: Slots) -> None:
    """What goes through the node's own proxy is traffic of the sandbox as well."""
    slot = await slots.acquire("one")
    guest = host.guest(slot)
    await slots.limit(slot, NetworkLimits(tx_bytes_per_second=RATE, burst_bytes=BURST))
    with namespace.inside(guest):
        listener = socket.create_server(("0.0.0.0", 0))
    port = listener.getsockname()[1]

    def give() -> None:
        with listener, listener.accept()[0] as connection:
            connection.sendall(bytes(MIB))

    def take() -> float:
        started = time.monotonic()
        with connect(None, slot.address, port) as connection:
            connection.settimeout(30)
            while connection.recv(64 * KIB):
                pass
            return time.monotonic() - started

    giving = asyncio.create_task(asyncio.to_thread(give))
    assert await asyncio.to_thread(take) >= (MIB - BURST) / RATE
    await giving


async def test_a_change_is_made_in_place(slots: Slots) -> None:
    slot = await slots.acquire("one")
    await slots.limit(slot, NetworkLimits(RATE, 2 * RATE))
    await slots.limit(slot, NetworkLimits(MOST, MOST, BURST_MOST))
    await slots.limit(slot, NetworkLimits(10 * RATE, 5_000_000_000))
    shown = disciplines(slot)
    assert shown.count("tbf") == 2
    assert "dev tap0 root" in shown and "rate 83886Kbit" in shown
    assert "dev uplink root" in shown and "rate 40Gbit" in shown


async def test_they_go_with_the_slot(slots: Slots) -> None:
    before = await slots.acquire("one")
    await slots.limit(before, NetworkLimits(RATE, RATE))
    await slots.release(before)
    after = await slots.acquire("other")
    assert after.name == before.name
    assert "tbf" not in disciplines(after)
    with pytest.raises(HostFault, match="was released"):
        await slots.limit(before, NetworkLimits(RATE))
    assert "tbf" not in disciplines(after)


async def test_they_outlive_the_nodes_life(slots: Slots, host: NetHost) -> None:
    slot = await slots.acquire("one")
    await slots.limit(slot, NetworkLimits(RATE, RATE))
    adopted = await slots.adopt("one")
    assert adopted == slot
    assert disciplines(slot).count("tbf") == 2


async def test_a_lost_link_is_told(slots: Slots) -> None:
    slot = await slots.acquire("one")
    with namespace.inside(slot.namespace):
        run("ip", "link", "del", "tap0")
    with pytest.raises(HostFault, match="tap0"):
        await slots.limit(slot, NetworkLimits(RATE))
