"""Connections that become ones to a port of a guest: every byte, each at the other's pace, and refusals."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agentenv.proxy.routing import AGENT_PORT
from support.front_node import API_KEY, Node, read_answer, read_head

KEY = f"X-API-KEY: {API_KEY}"
WISH = ("Connection: Upgrade", "Upgrade: tcp", KEY)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def head(port: object, *fields: str, sandbox_id: str = "abc", method: str = "GET") -> bytes:
    lines = [f"{method} /sandboxes/{sandbox_id}/forward?port={port} HTTP/1.1", "Host: localhost", *fields]
    return "".join(line + "\r\n" for line in lines).encode() + b"\r\n"


@asynccontextmanager
async def forwarded(node: Node, port: int) -> AsyncIterator[Streams]:
    """A connection to a port of the sandbox `abc`."""
    async with node.client() as (reader, writer):
        writer.write(head(port, *WISH))
        assert await read_head(reader) == (
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        yield reader, writer


async def refused(node: Node, *request: bytes) -> tuple[int, str]:
    """Status and message of the answers to requests on one connection, all the same."""
    async with node.client() as (reader, writer):
        writer.write(b"".join(request))
        answers = {(status, body) for status, _, body in [await read_answer(reader) for _ in request]}
        [(status, body)] = answers
        told = json.loads(body)
        assert told["code"] == status
        return status, str(told["message"])


async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says hello without being asked, then answers everything in capitals, and the end with `!`."""
    writer.write(b"hello")
    while data := await reader.read(65536):
        writer.write(data.upper())
    writer.write(b"!")


async def test_bytes_pass_both_ways_and_either_side_may_begin(node: Node) -> None:
    node.sandboxes.add("abc")
    async with forwarded(node, await node.guest(upper)) as (reader, writer):
        assert await reader.readexactly(5) == b"hello"
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.readexactly(18) == b"GET / HTTP/1.1\r\n\r\n"
        writer.write(b"\x00\xff\n")
        assert await reader.readexactly(3) == b"\x00\xff\n"
        writer.write_eof()
        assert await reader.read() == b"!"


@pytest.mark.parametrize("size", [0, 10, 3_000_000])
async def test_a_client_need_not_wait_for_the_answer(node: Node, size: int) -> None:
    node.sandboxes.add("abc")
    port = await node.guest(upper)
    async with node.client() as (reader, writer):
        writer.write(head(port, *WISH) + b"x" * size)
        writer.write_eof()
        await read_head(reader)
        assert await reader.read() == b"hello" + b"X" * size + b"!"


async def test_a_guest_that_ends_first_is_still_sent_to(node: Node) -> None:
    said: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        said.set_result(await reader.read())

    node.sandboxes.add("abc")
    async with forwarded(node, await node.guest(quiet)) as (reader, writer):
        assert await reader.read() == b""
        writer.write(b"late" * 100_000)
        writer.write_eof()
        assert len(await said) == 400_000


async def test_a_slow_reader_stops_the_writer_either_way(node: Node) -> None:
    """What waits in between is bounded: neither side can write all that it has before the other reads."""
    block, count = bytes(1 << 16), 1024
    reading = asyncio.Event()
    written = 0
    received: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        for _ in range(count):
            writer.write(block)
            await writer.drain()
            written += len(block)
        writer.write_eof()
        await reading.wait()
        received.set_result(len(await reader.read()))

    node.sandboxes.add("abc")
    async with forwarded(node, await node.guest(guest)) as (reader, writer):

        async def send() -> None:
            for _ in range(count):
                writer.write(block)
                await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.1)  # it has stopped once nothing moved for a while
        assert written < count * len(block)
        assert not sending.done()
        assert len(await reader.read()) == count * len(block)
        reading.set()
        await sending
        assert await received == count * len(block)


async def test_many_at_once(node: Node) -> None:
    node.sandboxes.add("abc")
    port = await node.guest(upper)

    async def one(number: int) -> bytes:
        async with forwarded(node, port) as (reader, writer):
            writer.write(b"n%d" % number * 1000)
            writer.write_eof()
            return await reader.read()

    answers = await asyncio.gather(*(one(number) for number in range(200)))
    assert answers == [b"hello" + b"N%d" % number * 1000 + b"!" for number in range(200)]
    assert len(node.plane.pool) == 0  # none of them is given to an HTTP request later


async def test_the_end_of_the_machine_resets_it(node: Node) -> None:
    node.sandboxes.add("abc")
    async with forwarded(node, await node.guest(upper)) as (reader, _):
        await reader.readexactly(5)
        node.plane.abort("abc", 1)
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_a_reset_of_the_guest_is_a_reset(node: Node) -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    node.sandboxes.add("abc")
    async with forwarded(node, await node.guest(reset)) as (reader, writer):
        writer.write(b"x")
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_a_client_that_leaves_ends_the_guests_connection(node: Node) -> None:
    ended = asyncio.Event()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
        finally:
            ended.set()

    node.sandboxes.add("abc")
    async with forwarded(node, await node.guest(guest)) as (_, writer):
        writer.transport.abort()
        await ended.wait()


async def test_a_paused_one_is_woken_and_what_was_sent_is_kept(node: Node) -> None:
    port = await node.guest(upper)
    node.sandboxes.sleepers["abc"] = "wakes"
    async with node.client() as (reader, writer):
        writer.write(head(port, *WISH) + b"early")
        while not node.sandboxes.woken:
            await asyncio.sleep(0.001)
        writer.write(b"later")
        writer.write_eof()
        node.sandboxes.add("abc", 2)
        node.sandboxes.wakes.set()
        await read_head(reader)
        assert await reader.read() == b"helloEARLYLATER!"


async def test_it_takes_the_key(node: Node) -> None:
    node.sandboxes.add("abc")
    port = await node.guest(upper)
    for fields in (WISH[:2], (*WISH[:2], "X-API-KEY: e2b_other"), (*WISH[:2], "X-API-KEY:")):
        assert (await refused(node, head(port, *fields)))[0] == 401
    assert (await refused(node, head(port, *WISH[:2], sandbox_id="unknown")))[0] == 401


async def test_a_private_one_takes_its_token_as_well(node: Node) -> None:
    node.sandboxes.add("abc", public=False, token="secret")
    port = await node.guest(upper)
    assert (await refused(node, head(port, *WISH)))[0] == 403
    assert (await refused(node, head(port, *WISH, "e2b-traffic-access-token: other")))[0] == 403
    async with node.client() as (reader, writer):
        writer.write(head(port, *WISH, "e2b-traffic-access-token: secret"))
        assert b" 101 " in await read_head(reader)
        assert await reader.readexactly(5) == b"hello"


async def test_one_that_does_not_run_is_told_before_and_the_connection_goes_on(node: Node) -> None:
    for state, status in ((None, 404), ("paused", 409), ("stalled", 507)):
        node.sandboxes.sleepers = {"abc": state} if state else {}  # type: ignore[dict-item]
        assert (await refused(node, head(80, *WISH), head(80, *WISH)))[0] == status


async def test_a_closed_port_is_told(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    node.sandboxes.add("abc")
    assert await refused(node, head(port, *WISH)) == (502, "The sandbox is running but port is not open")


async def test_a_machine_that_ends_while_it_is_connected_to(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    node.sandboxes.add("abc")
    asking = asyncio.create_task(refused(node, head(port, *WISH)))
    while not node.plane._relays:
        await asyncio.sleep(0)
    del node.sandboxes.routes["abc"]
    node.plane.abort("abc", 1)
    assert (await asking)[0] == 404


@pytest.mark.parametrize(
    ("request_head", "words"),
    [
        (head(0, *WISH), "'0' is no port"),
        (head(65536, *WISH), "is no port"),
        (head("http", *WISH), "is no port"),
        (head("80&x=1", *WISH), "is no port"),
        (head(80, KEY), "Upgrade: tcp"),
        (head(80, "Connection: Upgrade", "Upgrade: websocket", KEY), "Upgrade: tcp"),
        (head(80, *WISH, method="POST"), "by GET"),
        (head(AGENT_PORT, *WISH), "is the agent's"),
    ],
)
async def test_what_cannot_be_is_refused(node: Node, request_head: bytes, words: str) -> None:
    node.sandboxes.add("abc")
    status, message = await refused(node, request_head)
    assert status == 400
    assert words in message


async def test_the_same_path_in_a_sandbox_is_the_sandboxs(node: Node) -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got = await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(got), got))

    node.sandboxes.add("abc")
    port = await node.guest(guest)
    async with node.client() as (reader, writer):
        writer.write(
            f"GET /sandboxes/abc/forward?port=1 HTTP/1.1\r\nHost: {port}-abc.box.test\r\n\r\n".encode()
        )
        assert b"GET /sandboxes/abc/forward?port=1 HTTP/1.1\r\n" in (await read_answer(reader))[2]
