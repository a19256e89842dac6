"""Ports where only the guest's loopback address is listened on: the agent is asked to make them reachable."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import httpx
import pytest

from agentenv.proxy import dial
from support.core_agent import core_agent
from support.front_node import Node, head_for, read_answer, read_head

Asked = list[bytes]


async def ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that answers until its client leaves."""
    try:
        while True:
            await read_head(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    except asyncio.IncompleteReadError:
        writer.close()


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def agent(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], Awaitable[bytes]]], Awaitable[Asked]]:
    """Put something in the agent's place; gives the list of what it is asked."""

    async def place(answer: Callable[[], Awaitable[bytes]]) -> Asked:
        asked: Asked = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await read_head(reader)
            asked.append(head + await reader.readuntil(b"}"))
            writer.write(await answer())

        monkeypatch.setattr("agentenv.proxy.dial.AGENT_PORT", await node.guest(serve))
        node.sandboxes.add("abc")
        return asked

    return place


async def answer_of(node: Node, port: int) -> tuple[int, bytes]:
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        status, _, body = await read_answer(reader)
        return status, body


async def test_a_service_on_the_loopback_address_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.sandboxes.add("abc")
    service = await asyncio.start_server(ok, "::1", 0)
    port = service.sockets[0].getsockname()[1]
    with core_agent() as url:
        monkeypatch.setattr("agentenv.proxy.dial.AGENT_PORT", httpx.URL(url).port)
        try:
            assert await answer_of(node, port) == (200, b"ok")
            assert len(node.plane.pool) == 1
            assert await answer_of(node, port) == (200, b"ok")
        finally:
            node.plane.pool.close()
            service.close()
            await service.wait_closed()


async def test_the_agent_is_asked_once(
    node: Node, closed_port: int, agent: Callable[..., Awaitable[Asked]]
) -> None:
    async def reachable() -> bytes:
        return b"HTTP/1.1 204 No Content\r\n\r\n"

    asked = await agent(reachable)
    status, body = await answer_of(node, closed_port)
    assert (status, b"port is not open" in body) == (502, True)
    assert len(asked) == 1
    assert asked[0].startswith(b"POST /forward HTTP/1.1\r\n")
    assert asked[0].endswith(b'\r\n\r\n{"port":%d}' % closed_port)


async def test_a_server_that_starts_after_the_agent_was_asked(
    node: Node, closed_port: int, agent: Callable[..., Awaitable[Asked]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial, "PAUSES_S", (0.05,) * 400)

    async def start() -> bytes:
        await node.guest(ok, closed_port)
        return b"HTTP/1.1 404 Not Found\r\n\r\n"

    asked = await agent(start)
    assert await answer_of(node, closed_port) == (200, b"ok")
    assert len(asked) == 1


@pytest.mark.parametrize("said", [None, b"", b"HTTP/1.1 2", b"x" * 100_000])
async def test_an_agent_that_gives_no_answer(
    node: Node,
    closed_port: int,
    agent: Callable[..., Awaitable[Asked]],
    monkeypatch: pytest.MonkeyPatch,
    said: bytes | None,
) -> None:
    monkeypatch.setattr(dial, "ASK_TIMEOUT_S", 0.1)

    async def answer() -> bytes:
        if said is None:
            await asyncio.Event().wait()
        return said or b""

    asked = await agent(answer)
    status, body = await answer_of(node, closed_port)
    assert (status, b"port is not open" in body) == (502, True)
    assert len(asked) == 1


async def test_the_agents_own_port_is_nothing_to_ask_for(
    node: Node, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def expose(*_: object) -> bool:
        raise AssertionError("the agent was asked")

    monkeypatch.setattr(dial, "AGENT_PORT", closed_port)
    monkeypatch.setattr(dial, "expose", expose)
    route = node.sandboxes.add("abc")
    assert await dial.dial(route, closed_port, node.plane.current, 5.0) is None


async def test_a_client_that_leaves_ends_the_question(
    node: Node, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial, "ASK_TIMEOUT_S", 600)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        begun.set()
        try:
            await reader.read(-1)
        finally:
            ended.set()

    monkeypatch.setattr("agentenv.proxy.dial.AGENT_PORT", await node.guest(hang))
    node.sandboxes.add("abc")
    async with node.client() as (_reader, writer):
        writer.write(head_for("abc", closed_port, "/", "POST", "Content-Length: 9") + b"half")
        await begun.wait()
    await asyncio.wait_for(ended.wait(), 10)
