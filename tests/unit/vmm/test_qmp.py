"""The QMP client against a scripted server, and against QEMU itself."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import HostFault, OutcomeUnknown
from agentenv.vmm.qemu.qmp import Qmp, QmpBroken, QmpClosed, QmpRefused, QmpTimeout

GREETING = {"QMP": {"version": {"qemu": {"major": 10, "minor": 0, "micro": 2}}, "capabilities": []}}


class Server:
    """Greets, accepts `qmp_capabilities`, then leaves each command to the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.commands: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.greets = True
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if not self.greets:
            return
        self.send(GREETING)
        async for line in reader:
            message = json.loads(line)
            if message["execute"] == "qmp_capabilities":
                self.send({"return": {}, "id": message["id"]})
            else:
                await self.commands.put(message)

    def send(self, *messages: object) -> None:
        self.send_raw(b"".join(json.dumps(message).encode() + b"\r\n" for message in messages))

    def send_raw(self, data: bytes) -> None:
        self._writers[-1].write(data)

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(tmp_path / "qmp")
    listening = await asyncio.start_unix_server(made.serve, made.path, limit=16 << 20)
    yield made
    made.hang_up()
    listening.close()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Qmp]:
    connected = await Qmp.connect(server.path, timeout=5)
    yield connected
    connected.close()


async def test_the_greeting_tells_the_version(client: Qmp) -> None:
    assert client.version == (10, 0, 2)
    assert not client.closed


async def test_answers_find_their_commands_in_any_order(server: Server, client: Qmp) -> None:
    first = asyncio.create_task(client.execute("one"))
    second = asyncio.create_task(client.execute("two", {"a": [1, None]}))
    asked = [await server.commands.get() for _ in range(2)]
    assert (asked[1]["execute"], asked[1]["arguments"]) == ("two", {"a": [1, None]})
    assert "arguments" not in asked[0]
    server.send({"return": 2, "id": asked[1]["id"]}, {"return": {"x": 1}, "id": asked[0]["id"]})
    assert (await first, await second) == ({"x": 1}, 2)


async def test_messages_may_arrive_in_pieces(server: Server, client: Qmp) -> None:
    task = asyncio.create_task(client.execute("one"))
    asked = await server.commands.get()
    data = json.dumps({"return": "é" * 1000, "id": asked["id"]}, ensure_ascii=False).encode() + b"\n"
    for start in range(0, len(data), 97):
        server.send_raw(data[start : start + 97])
        await asyncio.sleep(0)
    assert await task == "é" * 1000


async def test_a_refusal_is_typed_and_harms_nothing(server: Server, client: Qmp) -> None:
    task = asyncio.create_task(client.execute("one"))
    asked = await server.commands.get()
    server.send({"error": {"class": "DeviceNotFound", "desc": "no such node"}, "id": asked["id"]})
    with pytest.raises(QmpRefused, match="QEMU refused one: no such node") as caught:
        await task
    assert caught.value.kind == "DeviceNotFound"
    assert isinstance(caught.value, HostFault)
    assert not client.closed


async def test_events_come_in_order_and_a_failing_callback_harms_no_other(
    server: Server, client: Qmp
) -> None:
    seen: list[tuple[str, object]] = []
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    def failing(name: str, data: object) -> None:
        raise ValueError(name)

    client.on_event(failing)
    client.on_event(lambda name, data: seen.append((name, data)))
    server.send({"event": "STOP"}, {"event": "BLOCK_IO_ERROR", "data": {"device": "root"}, "timestamp": {}})
    server.hang_up()
    await client.wait_closed()
    assert seen == [("STOP", {}), ("BLOCK_IO_ERROR", {"device": "root"})]
    assert len(failures) == 2


async def test_an_expected_event_is_the_first_that_is_accepted(server: Server, client: Qmp) -> None:
    loaded = client.expect("MIGRATION", lambda data: data["status"] in ("completed", "failed"))
    given_up = client.expect("MIGRATION", lambda data: True)
    given_up.cancel()
    server.send(
        {"event": "STOP"},
        *({"event": "MIGRATION", "data": {"status": word}} for word in ("active", "completed", "failed")),
    )
    assert await loaded == {"status": "completed"}


async def test_an_expected_event_does_not_come_from_the_dead(server: Server, client: Qmp) -> None:
    before = client.expect("MIGRATION", lambda data: True)
    server.hang_up()
    with pytest.raises(QmpBroken, match="MIGRATION: QEMU ended"):
        await before
    with pytest.raises(QmpBroken, match="MIGRATION"):
        await client.expect("MIGRATION", lambda data: True)


async def test_the_death_of_the_peer_reaches_all_who_wait_at_once(server: Server, client: Qmp) -> None:
    waiting = [asyncio.create_task(client.execute(name)) for name in ("one", "two", "three")]
    for _ in waiting:
        await server.commands.get()
    server.hang_up()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, QmpBroken) for result in results)
    assert "two: QEMU ended the connection" in str(results[1])
    with pytest.raises(QmpBroken):
        await client.execute("four")
    assert client.closed


async def test_closing_is_told_apart_from_breaking(server: Server, client: Qmp) -> None:
    waiting = asyncio.create_task(client.execute("one"))
    await server.commands.get()
    client.close()
    client.close()
    with pytest.raises(QmpClosed):
        await waiting
    with pytest.raises(QmpClosed):
        await client.execute("two")
    await client.wait_closed()


async def test_a_late_answer_is_dropped(server: Server, client: Qmp) -> None:
    with pytest.raises(QmpTimeout, match="did not answer slow") as caught:
        await client.execute("slow", timeout=0.01)
    assert isinstance(caught.value, OutcomeUnknown)
    late = await server.commands.get()
    task = asyncio.create_task(client.execute("next"))
    asked = await server.commands.get()
    server.send({"return": "late", "id": late["id"]}, {"return": "in time", "id": asked["id"]})
    assert await task == "in time"


async def test_a_cancelled_command_leaves_the_connection_whole(server: Server, client: Qmp) -> None:
    cancelled = asyncio.create_task(client.execute("one"))
    asked = await server.commands.get()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    server.send({"return": {}, "id": asked["id"]})
    task = asyncio.create_task(client.execute("two"))
    asked = await server.commands.get()
    server.send({"return": 2, "id": asked["id"]})
    assert await task == 2


async def test_large_commands_pass_a_full_socket(client: Qmp, server: Server) -> None:
    big = "x" * 1_000_000
    tasks = [asyncio.create_task(client.execute("big", {"data": big, "n": n})) for n in range(3)]
    for _ in tasks:
        asked = await server.commands.get()
        assert asked["arguments"]["data"] == big
        server.send({"return": asked["arguments"]["n"], "id": asked["id"]})
    assert await asyncio.gather(*tasks) == [0, 1, 2]


async def test_a_command_cut_off_half_sent_ends_the_connection(client: Qmp) -> None:
    task = asyncio.create_task(client.execute("big", {"data": "x" * 8_000_000}))
    await asyncio.sleep(0)  # what the socket takes is sent; the server has had no turn yet
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(QmpBroken, match="cut off"):
        await client.execute("next")


@pytest.mark.parametrize(
    "nonsense",
    [
        b"this is not json\n",
        b"x" * (9 << 20),
        b"[" * 20_000 + b"\n",
        b"[]\n",
        b"7\n",
        b'{"id": 1, "error": []}\n',
    ],
)
async def test_nonsense_ends_the_connection(server: Server, client: Qmp, nonsense: bytes) -> None:
    task = asyncio.create_task(client.execute("one"))
    await server.commands.get()
    server.send_raw(nonsense)
    with pytest.raises(QmpBroken, match="QEMU sent"):
        await task


async def test_without_a_greeting_the_reason_is_told(server: Server) -> None:
    server.greets = False
    with pytest.raises(QmpTimeout, match="another program may be connected"):
        await Qmp.connect(server.path, timeout=0.05)


async def test_nobody_there_is_broken(tmp_path: Path) -> None:
    with pytest.raises(QmpBroken, match="No such file"):
        await Qmp.connect(tmp_path / "none", timeout=1)


@pytest.fixture
async def qemu(tmp_path: Path) -> AsyncIterator[Path]:
    """QEMU without a machine."""
    program = shutil.which("qemu-system-x86_64")
    if program is None:
        pytest.skip("QEMU is not installed")
    path = tmp_path / "qmp"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    process = await asyncio.create_subprocess_exec(
        *(program, "-machine", "none", "-nodefaults", "-display", "none"),
        *(
            "-chardev",
            f"socket,id=qmp,fd={listener.fileno()},server=on,wait=off",
            "-mon",
            "chardev=qmp,mode=control",
        ),
        pass_fds=(listener.fileno(),),
    )
    listener.close()
    yield path
    if process.returncode is None:
        process.kill()
    await process.wait()


async def test_qemu_takes_descriptors_and_a_client_after_the_other(qemu: Path, tmp_path: Path) -> None:
    first = await Qmp.connect(qemu, timeout=20)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        added = await first.execute("add-fd", {"fdset-id": 7}, descriptors=[file])
        assert added["fdset-id"] == 7
    finally:
        os.close(file)
    node = {"driver": "file", "node-name": "f", "filename": "/dev/fdset/7"}
    await first.execute("blockdev-add", node)
    with pytest.raises(QmpRefused) as caught:
        await first.execute("no-such-command")
    assert caught.value.kind == "CommandNotFound"
    first.close()
    second = await Qmp.connect(qemu, timeout=20)
    names = [entry["node-name"] for entry in await second.execute("query-named-block-nodes")]
    assert names == ["f"]
    events: list[str] = []
    second.on_event(lambda name, _: events.append(name))
    await second.execute("quit")
    await second.wait_closed()
    assert events == ["SHUTDOWN"]


async def test_a_second_client_is_not_greeted(qemu: Path) -> None:
    first = await Qmp.connect(qemu, timeout=20)
    with pytest.raises(QmpTimeout):
        await Qmp.connect(qemu, timeout=0.2)
    assert (await first.execute("query-status"))["status"]
    first.close()
