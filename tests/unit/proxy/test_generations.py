"""Connections belong to one generation; its end is never taken for the end of an answer."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.proxy.upstream import GUEST_IDLE_S, idle_time
from support.front_node import Node, head_for, read_answer, read_head

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Counting:
    """A guest that counts its connections and the requests on each."""

    def __init__(self) -> None:
        self.requests: list[int] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.requests)
        self.requests.append(0)
        while True:
            await read_head(reader)
            self.requests[number] += 1
            writer.write(OK)


async def ask(node: Node, port: int, sandbox_id: str = "abc") -> None:
    async with node.client() as (reader, writer):
        writer.write(head_for(sandbox_id, port))
        assert (await read_answer(reader))[2] == b"ok"


async def test_a_connection_is_used_again_by_later_clients(node: Node) -> None:
    guest = Counting()
    port = await node.guest(guest)
    node.sandboxes.add("abc")
    for _ in range(3):
        await ask(node, port)
    assert guest.requests == [3]


async def test_never_for_another_generation_or_sandbox(node: Node) -> None:
    guest = Counting()
    port = await node.guest(guest)
    for generation in (1, 2):
        node.sandboxes.add("abc", generation)
        await ask(node, port)
    node.sandboxes.add("other")
    await ask(node, port, "other")
    assert guest.requests == [1, 1, 1]


async def test_the_very_same_request_goes_by_the_route_in_force(node: Node) -> None:
    guest = Counting()
    port = await node.guest(guest)
    async with node.client() as (reader, writer):

        async def again() -> int:
            writer.write(head_for("abc", port))
            return (await read_answer(reader))[0]

        node.sandboxes.add("abc")
        assert [await again() for _ in range(3)] == [200, 200, 200]
        node.sandboxes.add("abc", 2)
        assert [await again() for _ in range(2)] == [200, 200]
        assert guest.requests == [3, 2]
        node.sandboxes.add("abc", 2, public=False, token="sesame")
        assert [await again() for _ in range(2)] == [403, 403]
        node.sandboxes.add("abc", 2)
        assert await again() == 200
        del node.sandboxes.routes["abc"]
        assert [await again() for _ in range(2)] == [502, 502]
        assert guest.requests == [3, 3]


async def test_the_end_closes_idle_connections(node: Node) -> None:
    guest = Counting()
    port = await node.guest(guest)
    node.sandboxes.add("abc")
    await ask(node, port)
    assert len(node.plane.pool) == 1
    node.plane.abort("abc", 2)
    assert len(node.plane.pool) == 1
    node.plane.abort("abc", 1)
    assert len(node.plane.pool) == 0
    await ask(node, port)
    assert guest.requests == [1, 1]


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nabc",
    ],
)
async def test_the_end_of_a_machine_resets_its_clients(node: Node, start: bytes) -> None:
    begun = asyncio.Event()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(start)
        begun.set()
        await reader.read()

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        if start.endswith((b"abc", b"abc\r\n")):
            await read_head(reader)
            assert await reader.readuntil(b"abc")
        await begun.wait()
        del node.sandboxes.routes["abc"]
        node.plane.abort("abc", 1)
        with pytest.raises(ConnectionResetError):
            while await reader.read(100):
                pass
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        assert b"was not found" in (await read_answer(reader))[2]


async def test_the_end_of_a_machine_resets_its_tunnels(node: Node) -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
        await reader.read()

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "GET", "Connection: Upgrade", "Upgrade: x"))
        await read_head(reader)
        node.plane.abort("abc", 1)
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_other_sandboxes_go_on(node: Node) -> None:
    port = await node.guest(Counting())
    node.sandboxes.add("abc")
    node.sandboxes.add("other")
    async with node.client() as (reader, writer):
        writer.write(head_for("other", port))
        await read_answer(reader)
        node.plane.abort("abc", 1)
        writer.write(head_for("other", port))
        assert (await read_answer(reader))[2] == b"ok"


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ],
)
async def test_an_answer_that_breaks_off_is_a_reset(node: Node, start: bytes) -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(start)

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        with pytest.raises(ConnectionResetError):
            while await reader.read(100):
                pass


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcxx",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    ],
)
async def test_no_answer_or_none_that_is_valid(node: Node, answer: bytes) -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(answer)

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        for method in ("GET", "POST"):
            writer.write(head_for("abc", port, "/", method))
            status, _, body = await read_answer(reader)
            assert status == 502
            assert b"The sandbox " in body
            assert b"was not found" not in body


async def test_bytes_after_an_answer_never_reach_the_next_request(node: Node) -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await reader.read()

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        for _ in range(3):
            writer.write(head_for("abc", port))
            assert (await read_answer(reader))[2] == b"ok"
        writer.write(b"GET /api HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b'"/api"' in (await read_answer(reader))[2]


@pytest.mark.parametrize(("method", "status", "served"), [("GET", 200, 2), ("POST", 502, 1)])
async def test_only_a_safe_request_is_sent_again_when_a_kept_connection_dies(
    node: Node, method: str, status: int, served: int
) -> None:
    seen: list[bytes] = []

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(OK)
        seen.append(await read_head(reader))  # and closes without an answer, like a server that gives up

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        assert (await read_answer(reader))[0] == 200
        writer.write(head_for("abc", port, "/", method))
        assert (await read_answer(reader))[0] == status
    assert len(seen) == 1
    assert len(node.tasks) == served


async def test_a_connection_that_the_guest_closed_is_not_taken(node: Node) -> None:
    served = 0

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        await read_head(reader)
        writer.write(OK)

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        for _ in range(20):
            writer.write(head_for("abc", port, "/", "POST"))
            assert (await read_answer(reader))[2] == b"ok"
            await asyncio.sleep(0.01)  # for the guest's close to be on its way
    assert served == 20


async def test_idle_connections_are_closed_after_their_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.proxy.upstream.GUEST_IDLE_S", 0.01)
    ended = asyncio.Event()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(OK)
        await reader.read()
        ended.set()

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    await ask(node, port)
    await asyncio.wait_for(ended.wait(), 5)
    assert len(node.plane.pool) == 0


def test_the_guest_says_how_long_a_connection_may_idle() -> None:
    assert idle_time(80, None) == GUEST_IDLE_S
    assert idle_time(80, b"timeout=100, max=5") == GUEST_IDLE_S
    assert idle_time(80, b"timeout=2") == 1.0
    assert idle_time(80, b"max=5, Timeout=1") == 0.0
    assert idle_time(49983, None) > 10


async def test_a_client_that_leaves_ends_the_guests_connection(node: Node) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        begun.set()
        try:
            while True:
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    async with node.client() as (_reader, writer):
        writer.write(head_for("abc", port))
        await begun.wait()
    await asyncio.wait_for(ended.wait(), 10)


async def test_half_a_request_ends_with_its_client(node: Node) -> None:
    got: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
    begun = asyncio.Event()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        begun.set()
        try:
            got.set_result(await reader.read())
        except ConnectionError:
            got.set_result(None)

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    async with node.client() as (_reader, writer):
        writer.write(head_for("abc", port, "/", "POST", "Content-Length: 100") + b"abc")
        await begun.wait()
    assert await asyncio.wait_for(got, 10) in (b"abc", None)


async def test_the_servers_end_lets_answers_finish_and_resets_the_rest(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.proxy.front.SHUTDOWN_S", 0.5)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
        begun.set()
        await go_on.wait()
        if b"/finish" in head:
            writer.write(b"k")
        await reader.read()

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    async with node.client() as (idle, _), node.client() as (one, say_one), node.client() as (two, say_two):
        say_one.write(head_for("abc", port, "/finish"))
        await begun.wait()
        begun.clear()
        say_two.write(head_for("abc", port, "/hang"))
        await begun.wait()
        node.server.should_exit = True
        assert await idle.read() == b""
        go_on.set()
        assert (await read_answer(one))[2] == b"ok"
        assert await one.read() == b""
        await read_head(two)
        with pytest.raises(ConnectionResetError):
            await two.read()
        await asyncio.wait_for(node.serving, 10)


async def test_two_thousand_requests_leave_nothing_behind(node: Node) -> None:
    guest = Counting()
    port = await node.guest(guest)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        for _ in range(100):
            writer.write(head_for("abc", port) * 20)
            for _ in range(20):
                assert (await read_answer(reader))[2] == b"ok"
    assert guest.requests == [2000]
    assert node.plane._relays == set()
    assert len(node.plane.pool) == 1
