"""A guest whose agent lies, floods or does nothing: its own calls fail, typed and bounded."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.errors import GuestFault
from agentenv.sandbox import agent as agents
from agentenv.sandbox import guest as guests
from agentenv.sandbox.agent import Agent, Identity
from agentenv.sandbox.guest import Command, Guest
from agentenv.vmm.machine import GuestFiles, MachineSpec, Nic
from support.sandbox_parts import MemoryMachine, Steps

FILES = GuestFiles(Path("k"), Path("i"), Path("t"))
SPEC = MachineSpec("b1", 1, 512, 64, FILES, (), Nic(Path("n"), "tap0", "02:00"), 1000)
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
DEEP = b"[" * 20_000


class Liar:
    """Answers everything with `says`, then again and again with `then`."""

    def __init__(self, says: bytes, then: bytes = b"", *, ends: bool = True) -> None:
        self.says, self.then, self.ends = says, then, ends
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(65536)
            writer.write(self.says)
            while self.then:
                writer.write(self.then)
                await writer.drain()
            if not self.ends:
                await reader.read()
        except OSError:
            pass  # the client has had enough
        finally:
            writer.close()


@pytest.fixture
async def liar() -> AsyncIterator[Liar]:
    made = Liar(b"")
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


def body(content: bytes, status: bytes = b"HTTP/1.1 200 OK\r\n") -> bytes:
    return status + b"Content-Length: %d\r\n\r\n" % len(content) + content


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def envelope(message: bytes, flag: int = 0) -> bytes:
    return chunk(struct.pack(">BI", flag, len(message)) + message)


@pytest.mark.parametrize(
    "says",
    [
        b"SSH-2.0-liar\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        body(b"x", b"HTTP/1.1 500 No\r\n"),
        body(DEEP, b"HTTP/1.1 422 No\r\n"),
        body(json.dumps({"message": "x" * 60_000}).encode(), b"HTTP/1.1 422 No\r\n"),
        OK + b"Content-Length: 99\r\n\r\nx",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"X: " + b"y" * 200_000,
    ],
)
async def test_an_answer_that_is_none_is_a_fault_of_the_guest(liar: Liar, says: bytes) -> None:
    liar.says = says
    agent = Agent("127.0.0.1", liar.port)
    with pytest.raises(GuestFault) as caught:
        await agent.init(Identity())
    assert len(str(caught.value)) < 1000
    await agent.close()


@pytest.mark.parametrize("content", [DEEP, b"[]", b"nonsense", b"\xff"])
async def test_figures_that_are_none_are_a_fault_of_the_guest(liar: Liar, content: bytes) -> None:
    liar.says = body(content)
    agent = Agent("127.0.0.1", liar.port)
    with pytest.raises(GuestFault, match="no figures"):
        await agent.figures(None)
    await agent.close()


@pytest.mark.parametrize(
    ("says", "then"),
    [(CHUNKED, chunk(b"x" * 4096)), (b"", b"HTTP/1.1 100 Continue\r\n\r\n"), (OK, b"A: b\r\n")],
)
async def test_an_answer_without_end_is_given_up(
    liar: Liar, says: bytes, then: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "CALL_LIMIT_S", 0.5)
    liar.says, liar.then = says, then
    agent = Agent("127.0.0.1", liar.port)
    with pytest.raises(GuestFault):
        await agent.health()
    await agent.close()


@pytest.fixture
async def guest(liar: Liar) -> Guest:
    return Guest(MemoryMachine(SPEC, Steps(), lambda _: None), "127.0.0.1", liar.port)


def heard(_stream: str, _data: bytes) -> None:
    pass


@pytest.mark.parametrize(
    "message",
    [
        DEEP,
        b"[]",
        b"null",
        b"\xff",
        b'{"event":{"data":{"stdout":"A"}}}',
        b'{"event":{"end":{"exitCode":1,"status":{}}}}',
        b'{"event":{"end":{"exitCode":1,"status":"' + b"x" * 100_000 + b'"}}}',
        b'{"event":7}',
        b'{"event":{"data":[1],"end":null}}',
    ],
)
@pytest.mark.parametrize("flag", [0, 2])
async def test_a_message_that_is_none_is_a_fault_of_the_guest(
    liar: Liar, guest: Guest, message: bytes, flag: int
) -> None:
    liar.says = CHUNKED + envelope(message, flag) + b"0\r\n\r\n"
    with pytest.raises(GuestFault) as caught:
        await guest.run(Command(("true",), "root"), heard)
    assert len(str(caught.value)) < 1000


async def test_an_error_of_another_form_is_a_fault_of_the_guest(liar: Liar, guest: Guest) -> None:
    liar.says = CHUNKED + envelope(b'{"error":["x"]}', 2) + b"0\r\n\r\n"
    with pytest.raises(GuestFault):
        await guest.run(Command(("true",), "root"), heard)


async def test_a_message_without_end_is_not_kept(liar: Liar, guest: Guest) -> None:
    liar.says = CHUNKED + chunk(struct.pack(">BI", 0, guests.MESSAGE_LIMIT_BYTES + 1))
    with pytest.raises(GuestFault, match="too long"):
        await guest.run(Command(("true",), "root"), heard)


async def test_a_command_that_is_never_over_is_given_up(
    liar: Liar, guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests, "_GRACE_S", 0.2)
    liar.says, liar.ends = CHUNKED, False
    with pytest.raises(GuestFault, match="did not end a command"):
        await guest.run(Command(("true",), "root"), heard, limit_s=0.1)


async def test_a_file_that_does_not_move_is_given_up(
    liar: Liar, guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests, "STILL_S", 0.2)
    liar.says, liar.ends = CHUNKED + chunk(b"some"), False

    async def take(content: AsyncIterator[bytes]) -> bytes:
        return b"".join([part async for part in content])

    with pytest.raises(GuestFault, match="nothing came"):
        await guest.fetch("/x", take)
