"""Requests to sandboxes that are paused: kept until they run, refused, or answered as they must be."""

from __future__ import annotations

import asyncio
import json

import pytest
from websockets.asyncio.client import connect as connect_websocket
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from agentenv.proxy.directory import Guard
from agentenv.proxy.front import Front
from agentenv.proxy.waking import Waking
from support.front_node import Node, head_for, read_answer, read_head


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A guest that answers with the body it was sent, as its length header or chunks tell."""
    while True:
        head = (await read_head(reader)).lower()
        length = 0
        for line in head.split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        body = await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


async def asked(node: Node) -> None:
    """Return once a sandbox was asked to wake."""
    while not node.sandboxes.woken:
        await asyncio.sleep(0.001)


def wake(node: Node, sandbox_id: str = "abc") -> None:
    node.sandboxes.add(sandbox_id, 2)
    node.sandboxes.wakes.set()


@pytest.mark.parametrize("size", [0, 10, 3_000_000])
async def test_a_request_waits_and_then_goes_its_way(node: Node, size: int) -> None:
    port = await node.guest(echo)
    node.sandboxes.sleepers["abc"] = "wakes"
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "POST", f"Content-Length: {size}") + body)
        await asked(node)
        answer = asyncio.create_task(read_answer(reader))
        await asyncio.sleep(0)
        assert not answer.done()
        wake(node)
        assert (await answer)[::2] == (200, body)
        writer.write(head_for("abc", port))  # the connection goes on
        assert (await read_answer(reader))[0] == 200
    assert node.sandboxes.woken == ["abc"]


async def test_what_comes_meanwhile_is_kept_in_order(node: Node) -> None:
    port = await node.guest(echo)
    node.sandboxes.sleepers["abc"] = "wakes"
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "POST", "Content-Length: 6") + b"abc")
        await asked(node)
        writer.write(b"def" + head_for("abc", port))
        wake(node)
        assert (await read_answer(reader))[::2] == (200, b"abcdef")
        assert (await read_answer(reader))[::2] == (200, b"")


@pytest.mark.parametrize("way", ["host", "headers", "own headers", "signature"])
async def test_whatever_names_the_sandbox_wakes_it(
    node: Node, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    port = await node.guest(echo)
    monkeypatch.setattr("agentenv.proxy.plane.AGENT_PORT", port)  # where signed requests go
    node.sandboxes.sleepers["abc"] = "wakes"
    node.sandboxes.signatures["v1_x"] = "abc"
    fields = {
        "host": f"Host: {port}-abc.box.test:8000",
        "headers": f"Host: a\r\nE2b-Sandbox-Id: abc\r\nE2b-Sandbox-Port: {port}",
        "own headers": f"Host: a\r\nx-agentenv-sandbox-id: abc\r\nx-agentenv-target-port: {port}",
        "signature": "Host: a",
    }[way]
    async with node.client() as (reader, writer):
        path = "/files?path=/a&signature=v1_x" if way == "signature" else "/"
        writer.write(f"POST {path} HTTP/1.1\r\n{fields}\r\nContent-Length: 3\r\n\r\nabc".encode())
        await asked(node)
        wake(node)
        assert (await read_answer(reader))[::2] == (200, b"abc")
    assert node.sandboxes.woken == ["abc"]


async def test_a_websocket_wakes_it(node: Node) -> None:
    async def serve_echo(connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    node.sandboxes.sleepers["abc"] = "wakes"
    chat = Subprotocol("chat.v1")
    async with serve(serve_echo, "127.0.0.1", 0, subprotocols=[chat]) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        waking = asyncio.create_task(asked(node))
        waking.add_done_callback(lambda _: wake(node))
        routing = {"E2b-Sandbox-Id": "abc", "E2b-Sandbox-Port": str(port)}
        async with connect_websocket(
            f"ws://127.0.0.1:{node.port}/ws", subprotocols=[chat], additional_headers=routing
        ) as client:
            assert client.subprotocol == "chat.v1"
            await client.send("awake")
            assert await client.recv() == "awake"
        await waking


async def test_of_a_body_no_more_is_kept_than_came_at_once(node: Node) -> None:
    size = 64 << 20
    counted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        left = size
        while left:
            left -= len(await reader.read(1 << 20))
        counted.set_result(size)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    port = await node.guest(guest)
    node.sandboxes.sleepers["abc"] = "wakes"
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "POST", f"Content-Length: {size}"))

        async def send() -> None:
            for _ in range(size >> 20):
                writer.write(bytes(1 << 20))
                await writer.drain()

        sending = asyncio.create_task(send())
        await asked(node)
        await asyncio.sleep(0.1)  # what could be read would have been
        assert not sending.done()
        [front] = node.plane._connections
        assert isinstance(front, Front) and isinstance(front._exchange, Waking)
        assert sum(len(data) for data, _ in front._exchange.kept) + len(front._waiting) <= 1 << 20
        wake(node)
        assert (await read_answer(reader))[2] == b"ok"
        await sending
        assert await counted == size


async def test_many_requests_wait_together(node: Node) -> None:
    port = await node.guest(echo)
    node.sandboxes.sleepers["abc"] = "wakes"

    async def one(number: int) -> bytes:
        async with node.client() as (reader, writer):
            body = b"%d" % number
            writer.write(head_for("abc", port, "/", "POST", f"Content-Length: {len(body)}") + body)
            return (await read_answer(reader))[2]

    answers = [asyncio.create_task(one(number)) for number in range(50)]
    while len(node.sandboxes.woken) < 50:
        await asyncio.sleep(0.001)
    wake(node)
    assert await asyncio.gather(*answers) == [b"%d" % number for number in range(50)]


async def test_one_that_stands_still_is_told_apart(node: Node) -> None:
    node.sandboxes.sleepers["abc"] = "stalled"
    async with node.client() as (reader, writer):
        for _ in range(2):  # the connection stays usable
            writer.write(head_for("abc", 49983, "/", "POST", "Content-Length: 3") + b"abc")
            status, _, body = await read_answer(reader)
            told = json.loads(body)
            assert (status, told["code"], told["sandboxId"]) == (507, 507, "abc")
            assert "until the host has space" in told["message"]
    assert node.sandboxes.woken == []


async def test_one_that_does_not_wake_is_not_found(node: Node) -> None:
    node.sandboxes.sleepers["abc"] = "wakes"
    node.sandboxes.wakes.set()
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", 80))
        status, _, body = await read_answer(reader)
    assert (status, json.loads(body)["message"]) == (502, "The sandbox was not found")


async def test_a_client_that_leaves_meanwhile_is_forgotten(node: Node) -> None:
    port = await node.guest(echo)
    node.sandboxes.sleepers["abc"] = "wakes"
    async with node.client() as (_, writer):
        writer.write(head_for("abc", port))
        await asked(node)
        writer.transport.abort()
    wake(node)
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        assert (await read_answer(reader))[0] == 200


@pytest.mark.parametrize(("prefix", "status"), [("E2b-Sandbox-Id", 502), ("x-agentenv-sandbox-id", 410)])
async def test_one_that_is_not_to_wake(node: Node, prefix: str, status: int) -> None:
    """E2B's clients take a paused sandbox for one that is not there; AgentENV's are told."""
    node.sandboxes.sleepers["abc"] = "paused"
    port = "E2b-Sandbox-Port" if status == 502 else "x-agentenv-target-port"
    async with node.client() as (reader, writer):
        writer.write(f"GET / HTTP/1.1\r\nHost: localhost\r\n{prefix}: abc\r\n{port}: 80\r\n\r\n".encode())
        assert (await read_answer(reader))[0] == status
    assert node.sandboxes.woken == []


@pytest.mark.parametrize(
    ("field", "status"),
    [("X: y", 403), ("E2b-Traffic-Access-Token: wrong", 403), ("E2b-Traffic-Access-Token: sesame", 200)],
)
async def test_a_private_one_is_woken_by_who_may_reach_it(node: Node, field: str, status: int) -> None:
    port = await node.guest(echo)
    node.sandboxes.sleepers["abc"] = "wakes"
    node.sandboxes.guards["abc"] = Guard("access", "sesame", False)
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "GET", field))
        if status == 200:
            await asked(node)
            wake(node)
        assert (await read_answer(reader))[0] == status
    assert node.sandboxes.woken == (["abc"] if status == 200 else [])


@pytest.mark.parametrize("signed", [False, True])
async def test_its_agent_wakes_for_its_access_token_or_signature(
    node: Node, monkeypatch: pytest.MonkeyPatch, signed: bool
) -> None:
    port = await node.guest(echo)
    monkeypatch.setattr("agentenv.proxy.plane.AGENT_PORT", port)
    node.sandboxes.sleepers["abc"] = "wakes"
    node.sandboxes.guards["abc"] = Guard("access", "sesame", False)
    node.sandboxes.signatures["v1_x"] = "abc"
    node.sandboxes.signatures["v1_other"] = "other"
    async with node.client() as (reader, writer):
        for field in ("X: y", "X-Access-Token: wrong", "E2b-Traffic-Access-Token: sesame"):
            writer.write(head_for("abc", port, "/health", "GET", field))
            status, _, body = await read_answer(reader)
            assert (status, json.loads(body)["sandboxId"]) == (403, "abc")
        writer.write(head_for("abc", port, "/init", "POST", "X-Access-Token: access", "Content-Length: 0"))
        assert (await read_answer(reader))[0] == 404
        for signature in ("v1_bad", "v1_other"):
            writer.write(head_for("abc", port, f"/files?path=/a&signature={signature}"))
            assert (await read_answer(reader))[0] == 403
        assert node.sandboxes.woken == []
        path = "/files?path=/a&signature=v1_x" if signed else "/health"
        token = "X: y" if signed else "X-Access-Token: access"
        writer.write(head_for("abc", port, path, "GET", token))
        await asked(node)
        wake(node)
        assert (await read_answer(reader))[0] == 200


async def test_a_preflight_wakes_nothing_private(node: Node) -> None:
    node.sandboxes.sleepers["abc"] = "wakes"
    node.sandboxes.guards["abc"] = Guard("", "sesame", False)
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", 80, "/", "OPTIONS", "Access-Control-Request-Method: GET"))
        status, fields, _ = await read_answer(reader)
        assert (status, fields["access-control-allow-headers"]) == (204, "*")
    assert node.sandboxes.woken == []
