"""The limits of the data plane: what is beyond one is refused or ended, and told as such."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, cast

import pytest

from agentenv.config import Settings
from agentenv.proxy.limits import Limits
from support.front_node import Node, head_for, read_answer, read_head

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await read_head(reader)
        writer.write(OK)


async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has taken too long is looked for more often."""
    monkeypatch.setattr("agentenv.proxy.plane.SWEEP_S", 0.05)


def test_they_are_settings() -> None:
    limits = Limits.of(Settings(proxy_head_s=1, proxy_per_client=7, proxy_still_s=3))
    assert (limits.head_s, limits.per_client, limits.still_s) == (1, 7, 3)
    usual = Limits.of(Settings())
    assert (usual.idle_s, usual.head_bytes, usual.answer_s, usual.per_sandbox) == (640, 65536, 0, 0)


async def test_a_head_may_be_as_long_as_is_said(node: Node) -> None:
    async def talkative(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1100 + b"\r\nContent-Length: 0\r\n\r\n")

    port = await node.guest(talkative)
    node.sandboxes.add("abc")
    node.limit(head_bytes=1024)
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "GET", "X: " + "y" * 700))
        assert (await read_answer(reader))[0] == 502  # the guest's is too long
        writer.write(head_for("abc", port, "/", "GET", "X: " + "y" * 1100))
        assert (await read_answer(reader))[0] == 431


async def test_an_answer_that_does_not_begin(node: Node) -> None:
    port = await node.guest(never)
    node.sandboxes.add("abc")
    node.limit(answer_s=0.1)
    async with node.client() as (reader, writer):
        for _ in range(2):
            writer.write(head_for("abc", port, "/", "POST", "Content-Length: 3") + b"abc")
            status, _, body = await read_answer(reader)
            assert (status, json.loads(body)["port"]) == (504, port)


async def test_an_answer_that_has_begun_may_take_its_time(node: Node) -> None:
    go_on = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(OK[:-1])
        await go_on.wait()
        writer.write(OK[-1:])

    port = await node.guest(slow)
    node.sandboxes.add("abc")
    node.limit(answer_s=0.1)
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        await read_head(reader)
        await asyncio.sleep(0.4)  # several sweeps
        go_on.set()
        assert await reader.readexactly(2) == b"ok"


@pytest.mark.parametrize("begin", [b"POST", b"tunnel", b"body"])
async def test_nothing_moves(node: Node, begin: bytes) -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        if begin == b"tunnel":
            writer.write(b"HTTP/1.1 101 Changed\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n")
        elif begin == b"body":
            writer.write(OK[:-1])
        await reader.read()

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    node.limit(still_s=0.1)
    async with node.client() as (reader, writer):
        if begin == b"POST":
            writer.write(head_for("abc", port, "/", "POST", "Content-Length: 9") + b"half")
            assert (await read_answer(reader))[0] == 504
        else:
            writer.write(head_for("abc", port, "/", "GET", "Connection: Upgrade", "Upgrade: raw"))
            await read_head(reader)
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(10)


async def test_what_moves_is_not_still(node: Node) -> None:
    async def drops(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n")
        for _ in range(8):
            writer.write(b"x")
            await asyncio.sleep(0.2)

    port = await node.guest(drops)
    node.sandboxes.add("abc")
    node.limit(still_s=1.0)
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        assert (await read_answer(reader))[2] == b"x" * 8


async def test_as_many_requests_as_a_sandbox_may_have(node: Node) -> None:
    waiting, open_port = await node.guest(never), await node.guest(ok)
    for name in ("abc", "other"):
        node.sandboxes.add(name)
    node.limit(per_sandbox=2)
    async with contextlib.AsyncExitStack() as stack:
        first, second, third = [await stack.enter_async_context(node.client()) for _ in range(3)]
        for _, writer in (first, second):
            writer.write(head_for("abc", waiting, "/", "POST", "Content-Length: 9"))
        while len(node.plane._relays) < 2:
            await asyncio.sleep(0.001)
        for name, status in (("abc", 429), ("other", 200), ("abc", 429)):
            third[1].write(head_for(name, open_port))
            got, _, body = await read_answer(third[0])
            assert got == status
        assert json.loads(body)["connectionLimit"] == 2
        first[1].close()
        while len(node.plane._relays) > 1:
            await asyncio.sleep(0.001)
        for _ in range(5):
            third[1].write(head_for("abc", open_port))
            assert (await read_answer(third[0]))[0] == 200
    while node.plane._relays:
        await asyncio.sleep(0.001)
    assert not node.plane._by_sandbox


async def test_as_many_connections_as_a_client_may_have(node: Node) -> None:
    node.limit(per_client=2)
    request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    async with node.client() as (reader, writer), node.client() as (_, other):
        other.write(request)
        writer.write(request)
        assert (await read_answer(reader))[0] == 200
        async with node.client() as (third, _):
            status, fields, body = await read_answer(third)
            assert (status, fields["connection"], json.loads(body)["code"]) == (429, "close", 429)
            assert await third.read() == b""
        writer.write(request)
        assert (await read_answer(reader))[0] == 200
    while node.plane._connections:
        await asyncio.sleep(0.001)
    assert not node.plane._by_address


async def test_beyond_all_connections_the_longest_idle_goes(node: Node) -> None:
    node.limit(connections=2)
    request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    async with node.client() as (oldest, first), node.client() as (reader, writer):
        first.write(b"GET / HTTP/1.1\r\nHost")  # half a head waits as well
        loop, connections = asyncio.get_running_loop(), cast("set[Any]", node.plane._connections)
        while not any(each._head and each.waits_since < loop.time() for each in connections):
            await asyncio.sleep(0.001)
        writer.write(request)
        assert (await read_answer(reader))[0] == 200
        async with node.client() as (third, another):
            another.write(request)
            assert (await read_answer(third))[0] == 200
            assert await oldest.read() == b""
            writer.write(request)
            assert (await read_answer(reader))[0] == 200


async def test_who_has_a_request_under_way_is_not_ended_for_others(node: Node) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    port = await node.guest(silent)
    node.sandboxes.add("abc")
    node.limit(connections=2)
    async with node.client() as (_, one), node.client() as (_, other):
        for writer in (one, other):
            writer.write(head_for("abc", port))
        while node.plane.requests_under_way < 2:
            await asyncio.sleep(0.001)
        async with node.client() as (third, _):
            status, fields, _ = await read_answer(third)
            assert (status, fields["connection"]) == (429, "close")
        assert node.plane.requests_under_way == 2


async def test_a_body_for_the_api_that_stops_coming(node: Node) -> None:
    node.limit(head_s=0.1)
    async with node.client() as (reader, writer):
        writer.write(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nsome")
        with pytest.raises(ConnectionResetError):
            while await reader.read(1000):
                pass


async def test_a_sandbox_that_wakes_too_late(node: Node) -> None:
    port = await node.guest(ok)
    node.sandboxes.sleepers["abc"] = "wakes"
    node.limit(wake_s=0.05)
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        status, _, body = await read_answer(reader)
        assert (status, json.loads(body)["message"]) == (504, "The sandbox did not wake in time")
        node.sandboxes.add("abc", 2)  # it goes on waking
        node.sandboxes.wakes.set()
        writer.write(head_for("abc", port))
        assert (await read_answer(reader))[0] == 200
