"""Traffic that means harm, or speaks something else: what reaches a guest, and what it costs the node."""

from __future__ import annotations

import asyncio
import json

import pytest

from agentenv.proxy.front import Front
from support.front_node import Node, head_for, read_answer, read_head

CHUNKS = b"5\r\nhello\r\n0\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


class Witness:
    """A lenient guest that answers whatever looks like a request and remembers all bytes."""

    def __init__(self) -> None:
        self.saw = bytearray()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.saw += data
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" * data.count(b" HTTP/1.1\r\n"))


AMBIGUOUS = (
    "Content-Length: 0\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 0",
    "Content-Length: 0\r\nContent-Length: 35",
    "Content-Length: 0\r\nContent-Length: 0",
    "Content-Length: 0, 0",
    "Content-Length: +0",
    "Content-Length: -1",
    "Content-Length: 0x0",
    "Content-Length: 0 0",
    "Content-Length:",
    "Content-Length: \u0660",
    "Content-Length: 99999999999999999999999",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked, chunked",
    "Transfer-Encoding: identity, chunked",
    "Transfer-Encoding: chunked;q=1",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding: \x0bchunked",
    "Transfer-Encoding:\r\n chunked",
    "Transfer-Encoding : chunked",
    " Transfer-Encoding: chunked",
    "X: y\nTransfer-Encoding: chunked",
    "X: y\rTransfer-Encoding: chunked",
    "X: a\x00b",
    "X\x00: b",
    "X",
    ": y",
    "Host: other",
    "E2b-Sandbox-Id: other",
)


async def test_nothing_is_smuggled(node: Node) -> None:
    """A head that two parties could read differently goes nowhere, and what follows is not read as one."""
    guest = Witness()
    port = await node.guest(guest.serve)
    node.sandboxes.add("abc")
    for fields in AMBIGUOUS:
        head = head_for("abc", port, "/", "POST", "MARK").replace(b"MARK", fields.encode())
        async with node.client() as (reader, writer):
            writer.write(head + CHUNKS + SMUGGLED)
            status, answer, _ = await read_answer(reader)
            assert status in (400, 501), fields
            assert answer["connection"] == "close"
            assert await reader.read() == b""
        assert guest.saw == b"", fields


MISFRAMED = (
    b"5;\x00\r\nhello\r\n0\r\n\r\n",
    b"5\nhello\r\n0\r\n\r\n",
    b"5\r\nhello0\r\n\r\n",
    b"0x5\r\nhello\r\n0\r\n\r\n",
    b" 5\r\nhello\r\n0\r\n\r\n",
    b"5\r\nhello\r\n0\r\nX: y\n\r\n",
    b"5\r\nhello\r\n0\r\n folded: y\r\n\r\n",
    b"10000000000000000\r\nhello",
)


async def test_nor_by_the_way_a_body_is_framed(node: Node) -> None:
    guest = Witness()
    port = await node.guest(guest.serve)
    node.sandboxes.add("abc")
    for body in MISFRAMED:
        async with node.client() as (reader, writer):
            writer.write(head_for("abc", port, "/", "POST", "Transfer-Encoding: chunked") + body + SMUGGLED)
            try:
                while await reader.read(65536):
                    pass
            except ConnectionResetError:
                pass  # the guest had answered already
    assert b"/smuggled" not in guest.saw


async def test_a_flood_of_fields(node: Node) -> None:
    """As many as fit are passed on; more are refused before they are kept."""

    async def counts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await read_head(reader)
            text = b"%d" % head.count(b"\r\nA:")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))

    port = await node.guest(counts)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        for _ in range(2):
            writer.write(head_for("abc", port)[:-2] + b"A:\r\n" * 15_000 + b"\r\n")
            assert (await read_answer(reader))[2] == b"15000"
        writer.write(head_for("abc", port)[:-2] + b"A:\r\n" * 2_000_000)
        assert (await read_answer(reader))[0] == 431


async def test_what_is_pipelined_ahead_is_not_all_kept(node: Node) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_head(reader)
            asked.set()
            await go_on.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    port = await node.guest(slow)
    node.sandboxes.add("abc")
    request = head_for("abc", port, "/", "GET", "X: " + "y" * 30_000)
    async with node.client() as (reader, writer):
        writer.write(request)
        await asked.wait()
        for _ in range(1000):
            writer.write(request)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 0.5)
        (front,) = node.plane._connections
        assert isinstance(front, Front)
        assert len(front._waiting) < 1 << 20
        go_on.set()
        for _ in range(3):
            assert (await read_answer(reader))[0] == 200
        writer.transport.abort()


async def test_interim_answers_without_end_wait_for_a_slow_client(node: Node) -> None:
    written, stopped = 0, asyncio.Event()

    async def hints(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await read_head(reader)
        hint = b"HTTP/1.1 103 Early Hints\r\nLink: " + b"x" * 1000 + b"\r\n\r\n"
        while True:
            writer.write(hint * 64)
            written += len(hint) * 64
            try:
                await asyncio.wait_for(writer.drain(), 0.5)
            except TimeoutError:
                stopped.set()
                return

    port = await node.guest(hints)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await stopped.wait()
        assert written < 64 << 20
        writer.transport.abort()


async def test_an_upgrade_that_a_guest_ignores_is_a_request_like_others(node: Node) -> None:
    guest = Witness()
    port = await node.guest(guest.serve)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        for protocol in ("h2c", "TLS/1.0", "nonsense/9"):
            writer.write(head_for("abc", port, "/", "GET", "Connection: Upgrade", f"Upgrade: {protocol}"))
            assert (await read_answer(reader))[2] == b"ok"
        assert guest.saw.count(b"Connection: Upgrade\r\nUpgrade: ") == 3


async def test_http_2_is_told_that_it_is_not_spoken(node: Node) -> None:
    async with node.client() as (reader, writer):
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04" + b"\x00" * 5)
        status, fields, body = await read_answer(reader)
        assert (status, fields["connection"]) == (505, "close")
        assert "HTTP/1.1" in json.loads(body)["message"]


async def test_tls_is_told_that_it_is_not_spoken_here(node: Node) -> None:
    async with node.client() as (reader, writer):
        writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)))
        status, _, body = await read_answer(reader)
        assert status == 400
        assert "TLS is not spoken on this port" in json.loads(body)["message"]
        assert await reader.read() == b""


async def test_other_protocols_are_refused(node: Node) -> None:
    node.limit(head_s=0.1)  # for what could still become a head
    for said in (
        b"\x00" * 1000,
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x05\x01\x00",
        b"EHLO x\r\n\r\n",
        b"*1\r\n$4\r\n",
    ):
        async with node.client() as (reader, writer):
            writer.write(said)
            assert (await read_answer(reader))[0] in (400, 408), said
            assert await reader.read() == b""
