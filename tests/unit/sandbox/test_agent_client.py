"""The client of the guest agent, against servers on the loopback address."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from agentenv.errors import GuestFault
from agentenv.sandbox.agent import Agent, DriveFailed, Identity, init_document, unless_exit
from agentenv.snapshot.records import Attached
from agentenv.vmm.machine import MachineSpec, Nic
from support.sandbox_parts import GUEST, MemoryMachine, Steps

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

IDENTITY = Identity("i1", "t1", "i1", "0" * 32, {"A": "ü"}, "token", "user", None)
OK = b"HTTP/1.1 204 No Content\r\n\r\n"


def machine() -> MemoryMachine:
    spec = MachineSpec("i1", 1, 512, 2048, GUEST, (), Nic(Path("/ns"), "tap0", "02"), 1000)
    return MemoryMachine(spec, Steps(), lambda _: None)


async def init_once(port: int) -> None:
    agent = Agent("127.0.0.1", port)
    try:
        await agent.init(IDENTITY)
    finally:
        await agent.close()


@asynccontextmanager
async def serving(handler: Handler, port: int = 0) -> AsyncIterator[int]:
    """A server that has seen off all its connections when it ends; yields its port."""
    tasks: list[asyncio.Task[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(handle(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()
        await asyncio.gather(*tasks)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


async def answer_always(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.readuntil(b"\r\n\r\n"):
        writer.write(OK)


@pytest.mark.parametrize(
    ("said", "figures"),
    [
        (b'{"mem_used": 5}', {"mem_used": 5}),
        (b"[1]", None),
        (b"{" * 10, None),
        (b"[" * 60_000, None),
        (b'{"mem_used": ' + b"9" * 6000 + b"}", None),
        (b"\xff", None),
        (b"x" * 70_000, None),
    ],
)
async def test_what_a_guest_says_of_itself_is_figures_or_a_fault(
    said: bytes, figures: dict[str, int] | None
) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"X-Access-Token: token" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))
        await writer.drain()

    async with serving(say) as port:
        agent = Agent("127.0.0.1", port)
        if figures is None:
            with pytest.raises(GuestFault):
                await agent.figures("token")
        else:
            assert await agent.figures("token") == figures
        await agent.close()


async def test_ready_once_the_listener_is_there() -> None:
    port = free_port()
    agent = Agent("127.0.0.1", port)
    waiting = asyncio.create_task(agent.wait_ready(machine(), 10))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    async with serving(answer_always, port):
        await waiting
        await agent.close()


async def test_a_listener_that_drops_its_first_connections_is_asked_again() -> None:
    seen = 0

    async def shy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        if seen >= 3:
            await answer_always(reader, writer)

    async with serving(shy) as port:
        agent = Agent("127.0.0.1", port)
        await agent.wait_ready(machine(), 10)
        assert seen >= 3
        await agent.close()


async def test_no_answer_in_time_is_the_guests_fault() -> None:
    with pytest.raises(GuestFault, match=r"did not answer within 0\.1 s; last on the console: last line"):
        await Agent("127.0.0.1", free_port()).wait_ready(machine(), 0.1)


async def test_a_machine_that_ends_first_is_told_with_its_detail() -> None:
    guest = machine()
    waiting = asyncio.create_task(Agent("127.0.0.1", free_port()).wait_ready(guest, 30))
    await asyncio.sleep(0)
    guest.die("kernel panic")
    with pytest.raises(GuestFault, match="machine i1 crashed: kernel panic"):
        await waiting


async def test_cancelled_while_waiting_nothing_is_left() -> None:
    before = asyncio.all_tasks()
    waiting = asyncio.create_task(Agent("127.0.0.1", free_port()).wait_ready(machine(), 30))
    await asyncio.wait({waiting}, timeout=0.1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_init_goes_over_the_connection_that_answered() -> None:
    bodies: list[dict[str, object]] = []
    connections = 0

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while head := (await reader.readuntil(b"\r\n\r\n")).decode():
            length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            if body := await reader.readexactly(length):
                assert head.startswith("POST /init HTTP/1.1\r\n")
                bodies.append(json.loads(body))
            writer.write(OK)

    async with serving(record) as port:
        agent = Agent("127.0.0.1", port)
        await agent.wait_ready(machine(), 10)
        await agent.init(IDENTITY)
        await agent.close()
    [body] = bodies
    assert connections == 1
    assert body["envVars"] == {"A": "ü"}
    assert body["accessToken"] == "token"
    assert len(base64.b64decode(str(body["entropy"]))) == 256


async def test_a_refused_init_is_the_guests_fault_with_its_words() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 Oops\r\nContent-Length: 7\r\n\r\nno disk")

    async with serving(refuse) as port:
        with pytest.raises(GuestFault, match="/init with 500: no disk"):
            await init_once(port)


@pytest.mark.parametrize("sent", [b"SSH-2.0-OpenSSH\r\n\r\n", b"", b"HTTP/1.1 204"])
async def test_what_is_no_answer_is_the_guests_fault(sent: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)

    async with serving(talk) as port:
        with pytest.raises(GuestFault):
            await init_once(port)


async def test_an_answer_without_end_is_cut_off() -> None:
    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async with serving(pour) as port:
        with pytest.raises(GuestFault, match="too long"):
            await init_once(port)


async def test_work_that_ends_before_the_machine_gives_its_result() -> None:
    async def work() -> int:
        return 3

    assert await unless_exit(machine(), work()) == 3


def test_the_init_document() -> None:
    document = init_document(IDENTITY, now=1_800_000_000.25, entropy=b"\1\2")
    assert len(document.pop("lifecycleID")) == 16
    assert document == {
        "sandboxId": "i1",
        "templateId": "t1",
        "hostname": "i1",
        "machineId": "0" * 32,
        "envVars": {"A": "ü"},
        "accessToken": "token",
        "timestamp": "2027-01-15T08:00:00.250000000Z",
        "defaultUser": "user",
        "entropy": "AQI=",
    }


def test_drives_are_told_by_their_places() -> None:
    drive = Attached("data", "debian:12", "/mnt/data", (), 1024, part="set")
    document = init_document(Identity(drives={2: drive}, disk_mib=4096), now=1.0, entropy=b"\1")
    assert document["drives"] == [
        {"name": "data", "serial": "spare2", "path": "/mnt/data", "readOnly": True, "subPath": "set"}
    ]
    assert document["diskSizeMB"] == 4096


@pytest.mark.parametrize("body", [b'{"message": "drive \'data\': no"}', b"drive 'data': no"])
async def test_a_drive_that_cannot_be_used_is_told_at_once(body: bytes) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 422 No\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with serving(refuse) as port:
        agent = Agent("127.0.0.1", port)
        with pytest.raises(DriveFailed, match=r"^drive 'data': no$"):
            await agent.take_over(machine(), IDENTITY, 30)
        await agent.close()


def test_what_is_not_told_stays_as_it_is() -> None:
    one, two = (init_document(Identity(), now=1.0, entropy=b"\1") for _ in range(2))
    assert set(one) == {"timestamp", "entropy", "lifecycleID"}
    assert one["lifecycleID"] != two["lifecycleID"]
