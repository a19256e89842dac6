"""Requests through a real front: to the API, to guests, one after the other on one connection."""

from __future__ import annotations

import asyncio
import json
import socket
from hashlib import sha256

import httpx
import pytest
from websockets.asyncio.client import connect as connect_websocket
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from support.front_node import Node, head_for, read_answer, read_head


async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers each request on a connection with its own head as the body."""
    while True:
        head = await read_head(reader)
        body = b"" if head.startswith(b"HEAD") else head
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(head), body))


async def count_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers with how many bytes followed the head, as it was framed."""
    while True:
        head = await read_head(reader)
        got = 0
        if b"chunked" in head:
            while not (line := await reader.readline()).startswith(b"0"):
                got += len(await reader.readexactly(int(line.split(b";")[0], 16)))
                await reader.readline()
            while await reader.readline() != b"\r\n":
                pass
        else:
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            while got < length:
                got += len(await reader.read(min(length - got, 1 << 20)))
        text = b"%d" % got
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))


async def test_api_requests_reach_the_api(node: Node) -> None:
    async with httpx.AsyncClient(base_url=node.url) as client:
        for _ in range(3):
            answer = await client.post("/sandboxes", content=b"x" * 500_000)
            assert answer.json() == {"api": "/sandboxes", "method": "POST", "bytes": 500_000}


async def test_what_goes_through_is_counted(node: Node) -> None:
    port = await node.guest(count_body)
    node.sandboxes.add("i1")
    async with node.client() as (reader, writer):
        for _ in range(2):
            writer.write(head_for("i1", port, "/", "POST", "Content-Length: 5000") + b"x" * 5000)
            assert (await read_answer(reader))[2] == b"5000"
        traffic = node.plane.traffic
        assert (traffic.connections, traffic.requests, traffic.to_guests) == (1, 2, 10_000)
        answer = len(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n5000")
        assert traffic.from_guests == 2 * answer
        assert (node.plane.connections_open, node.plane.requests_under_way) == (1, 0)


async def test_the_api_takes_chunked_bodies_and_a_later_request(node: Node) -> None:
    async def parts() -> list[bytes]:
        return [b"abc", b"de"]

    async with node.client() as (reader, writer):
        for _ in range(2):
            writer.write(b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            for part in await parts():
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            assert json.loads((await read_answer(reader))[2])["bytes"] == 5


async def test_an_early_answer_of_the_api_leaves_the_connection_in_step(node: Node) -> None:
    async with node.client() as (reader, writer):
        writer.write(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc")
        assert json.loads((await read_answer(reader))[2])["api"] == "/early"
        writer.write(b"defghijGET /next HTTP/1.1\r\nHost: a\r\n\r\n")
        assert json.loads((await read_answer(reader))[2])["api"] == "/next"


async def test_a_websocket_of_the_api_is_the_apis(node: Node) -> None:
    async with connect_websocket(f"ws://127.0.0.1:{node.port}/ws", compression=None) as client:
        await client.send("hi")
        assert await client.recv() == "api:hi"


async def test_an_upgrade_that_the_api_does_not_know_is_ignored(node: Node) -> None:
    async with node.client() as (reader, writer):
        for _ in range(2):
            writer.write(
                b"POST /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
                b"Content-Length: 2\r\n\r\nab"
            )
            assert json.loads((await read_answer(reader))[2])["bytes"] == 2


async def test_one_connection_serves_the_api_and_several_sandboxes(node: Node) -> None:
    ports = {name: await node.guest(hello) for name in ("one", "two")}
    for name in ports:
        node.sandboxes.add(name)
    async with node.client() as (reader, writer):
        for _ in range(2):
            for name, port in ports.items():
                writer.write(head_for(name, port, "/a//b%2f?q=1"))
                status, _, body = await read_answer(reader)
                assert status == 200
                assert body.startswith(b"GET /a//b%2f?q=1 HTTP/1.1\r\n")
                assert b"E2b-Sandbox-Id: " + name.encode() in body
                assert b"X-Forwarded-For: 127.0.0.1\r\n" in body
            writer.write(b"GET /api HTTP/1.1\r\nHost: localhost\r\n\r\n")
            status, _, body = await read_answer(reader)
            assert json.loads(body)["api"] == "/api"


async def test_the_host_alone_routes(node: Node) -> None:
    port = await node.guest(hello)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(f"GET /sandboxes HTTP/1.1\r\nHost: {port}-abc.box.test:8000\r\n\r\n".encode())
        assert (await read_answer(reader))[2].startswith(b"GET /sandboxes HTTP/1.1\r\n")


async def test_a_service_is_told_another_host(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    port = await node.guest(hello)
    node.sandboxes.add("abc", mask_host="localhost:${PORT}")
    asked = f"GET / HTTP/1.1\r\nHost: {port}-abc.box.test\r\n\r\n".encode()
    async with node.client() as (reader, writer):
        writer.write(asked)
        body = (await read_answer(reader))[2]
        assert b"\r\nHost: localhost:%d\r\n" % port in body
        assert b"\r\nX-Forwarded-Host: %d-abc.box.test\r\n" % port in body
    monkeypatch.setattr("agentenv.proxy.order.AGENT_PORT", port)  # the agent is told the truth
    async with node.client() as (reader, writer):
        writer.write(asked)
        assert b"\r\nHost: %d-abc.box.test\r\n" % port in (await read_answer(reader))[2]


async def test_pipelined_requests_are_answered_in_order(node: Node) -> None:
    port = await node.guest(hello)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        mixed = [
            head_for("abc", port, f"/{n}") if n % 2 else b"GET /api HTTP/1.1\r\nHost: a\r\n\r\n"
            for n in range(9)
        ]
        writer.write(b"\r\n".join(mixed))
        for n in range(9):
            body = (await read_answer(reader))[2]
            assert body.startswith(b"GET /%d " % n) if n % 2 else b'"/api"' in body


@pytest.mark.parametrize("size", [1, 7, 64])
async def test_bytes_may_come_in_any_pieces(node: Node, size: int) -> None:
    port = await node.guest(count_body)
    node.sandboxes.add("abc")
    request = (
        head_for("abc", port, "/", "POST", "Transfer-Encoding: chunked")
        + b"3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\nT: v\r\n\r\n"
        + head_for("abc", port, "/", "POST", "Content-Length: 9")
        + b"123456789"
        + b"POST /api HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nabcd"
    )
    async with node.client() as (reader, writer):
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(request), size):
            writer.write(request[start : start + size])
            await asyncio.sleep(0)
        assert (await read_answer(reader))[2] == b"7"
        assert (await read_answer(reader))[2] == b"9"
        assert json.loads((await read_answer(reader))[2])["bytes"] == 4


@pytest.mark.parametrize("size", [1, 5, 40])
async def test_answers_may_come_in_any_pieces(node: Node, size: int) -> None:
    answers = (
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x\r\nabc\r\n0\r\nT: v\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
    )

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await read_head(reader)
            for start in range(0, len(answer), size):
                writer.write(answer[start : start + size])
                await asyncio.sleep(0.001)

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        for answer in answers:
            writer.write(head_for("abc", port))
            assert await reader.readexactly(len(answer)) == answer
    assert len(node.tasks) == 1


async def test_a_client_of_http_1_0_is_answered_and_closed(node: Node) -> None:
    port = await node.guest(hello)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port).replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, fields, body = await read_answer(reader)
        assert (status, fields["connection"]) == (200, "close")
        assert body.startswith(b"GET / HTTP/1.0\r\n")
        assert await reader.read() == b""


async def test_head_answers_have_no_body_and_keep_the_connection(node: Node) -> None:
    port = await node.guest(hello)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "HEAD"))
        assert b"\r\nContent-Length: " in await read_head(reader)
        writer.write(head_for("abc", port))
        assert (await read_answer(reader))[2].startswith(b"GET / ")


async def test_large_bodies_pass_both_ways(node: Node) -> None:
    size = 24 << 20

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        left = size
        while left:
            data = await reader.read(1 << 18)
            left -= len(data)
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    port = await node.guest(echo)
    node.sandboxes.add("abc")
    block = bytes(range(256)) * 4096
    sent, got = sha256(), sha256()
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "POST", f"Content-Length: {size}"))

        async def send() -> None:
            for _ in range(size // len(block)):
                sent.update(block)
                writer.write(block)
                await writer.drain()

        sending = asyncio.create_task(send())
        await read_head(reader)
        while length := int(await reader.readline(), 16):
            got.update(await reader.readexactly(length))
            await reader.readline()
        await sending
    assert got.digest() == sent.digest()


async def test_a_slow_reader_stops_the_guest(node: Node) -> None:
    written = 0
    enough = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 268435456\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            written += 65536
            if written > 1 << 20:
                enough.set()
            await writer.drain()

    port = await node.guest(flood)
    node.sandboxes.add("abc")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    with client:
        await loop.sock_connect(client, ("127.0.0.1", node.port))
        await loop.sock_sendall(client, head_for("abc", port))
        await enough.wait()
        before = -1
        while before != written:  # until nothing moves any more
            before = written
            await asyncio.sleep(0.2)
        assert written < 64 << 20


async def test_a_slow_guest_stops_the_client(node: Node) -> None:
    release = asyncio.Event()

    async def sluggish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        await release.wait()
        left = 64 << 20
        while left:
            left -= len(await reader.read(1 << 20))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    port = await node.guest(sluggish)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "POST", f"Content-Length: {64 << 20}"))
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 64 << 20:
                writer.write(b"x" * (1 << 20))
                sent += 1 << 20
                await asyncio.wait_for(writer.drain(), 0.5)
        assert sent < 48 << 20
        release.set()
        while sent < 64 << 20:
            writer.write(b"x" * (1 << 20))
            sent += 1 << 20
            await writer.drain()
        assert (await read_answer(reader))[2] == b"ok"


async def test_expect_continue_is_between_client_and_guest(node: Node) -> None:
    async def careful(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"\r\nExpect: 100-continue\r\n" in await read_head(reader)
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(3)
        writer.write(
            b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n" + body
        )

    port = await node.guest(careful)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "PUT", "Content-Length: 3", "Expect: 100-continue"))
        assert await read_head(reader) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await read_head(reader)).startswith(b"HTTP/1.1 103 ")
        assert (await read_answer(reader))[2] == b"abc"


async def test_a_refused_expectation_ends_the_connection(node: Node) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    port = await node.guest(refuse)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "PUT", "Content-Length: 3", "Expect: 100-continue"))
        status, fields, _ = await read_answer(reader)
        assert (status, fields["connection"]) == (413, "close")
        assert await reader.read() == b""


async def test_a_websocket_passes_with_its_subprotocol(node: Node) -> None:
    async def echo(connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    node.sandboxes.add("abc", token="sesame", public=False)
    chat = Subprotocol("chat.v1")
    async with serve(echo, "127.0.0.1", 0, subprotocols=[chat]) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with connect_websocket(
            f"ws://127.0.0.1:{node.port}/proxy/ws",
            subprotocols=[chat],
            additional_headers={
                "E2b-Sandbox-Id": "abc",
                "E2b-Sandbox-Port": str(port),
                "E2b-Traffic-Access-Token": "sesame",
            },
        ) as client:
            assert client.subprotocol == "chat.v1"
            for message in ("a", b"\x00" * 1_000_000, "c"):
                await client.send(message)
                assert await client.recv() == message


async def test_an_upgraded_connection_closes_one_way_at_a_time(node: Node) -> None:
    async def raw(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\nfirst")
        said = await reader.read()  # until the client has closed its half
        writer.write(said.upper())

    port = await node.guest(raw)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "GET", "Connection: Upgrade", "Upgrade: raw"))
        assert b"\r\nUpgrade: raw\r\n" in await read_head(reader)
        assert await reader.readexactly(5) == b"first"
        writer.write(b"abc")
        writer.write_eof()
        assert await reader.read() == b"ABC"


async def test_a_guest_that_closes_its_half_is_still_sent_to(node: Node) -> None:
    said: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def raw(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n")
        writer.write_eof()
        said.set_result(await reader.read())

    port = await node.guest(raw)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "GET", "Connection: Upgrade", "Upgrade: raw"))
        await read_head(reader)
        assert await reader.read() == b""
        writer.write(b"late" * 100_000)
        writer.write_eof()
        assert len(await said) == 400_000


async def test_no_upgrade_on_the_agents_port(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    port = await node.guest(hello)
    monkeypatch.setattr("agentenv.proxy.order.AGENT_PORT", port)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "GET", "Connection: Upgrade", "Upgrade: h2c"))
        assert b"pgrade" not in (await read_answer(reader))[2]


async def test_a_client_that_closed_its_half_gets_its_answer(node: Node) -> None:
    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        await asyncio.sleep(0.1)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.read()

    port = await node.guest(late)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        writer.write_eof()
        assert (await read_answer(reader))[2] == b"ok"
        assert await reader.read() == b""


async def test_events_arrive_as_they_are_sent(node: Node) -> None:
    go_on = asyncio.Event()

    async def events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for n in range(3):
            writer.write(b"9\r\ndata: %d\n\n\r\n" % n)
            await go_on.wait()
            go_on.clear()
        writer.write(b"0\r\n\r\n")

    port = await node.guest(events)
    node.sandboxes.add("abc")
    fields = {"E2b-Sandbox-Id": "abc", "E2b-Sandbox-Port": str(port)}
    async with (
        httpx.AsyncClient(base_url=node.url) as client,
        client.stream("GET", "/", headers=fields) as answer,
    ):
        seen = []
        async for part in answer.aiter_raw():
            seen.append(part)
            go_on.set()
        assert seen == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]


async def test_an_answer_that_ends_by_close_ends_by_close(node: Node) -> None:
    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"z" * 300_000)

    port = await node.guest(old)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        assert await read_head(reader) == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
        assert len(await reader.read()) == 300_000


async def test_no_delay_on_both_hops(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    port = await node.guest(hello)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        await read_answer(reader)
        transports = [front._transport for front in node.plane._connections]  # type: ignore[attr-defined]
        transports += [kept[0].transport for kept in node.plane.pool._idle.values()]
        assert len(transports) == 2
        for transport in transports:
            sock = transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
