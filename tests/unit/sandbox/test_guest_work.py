"""Commands and files of the node's own in a guest, with the real agent on the host."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from agentenv.errors import GuestFault
from agentenv.sandbox import starting
from agentenv.sandbox.guest import Command, CommandFailed, Guest, Output
from agentenv.snapshot.records import GuestSettings, Start
from agentenv.vmm.machine import GuestFiles, MachineSpec, Nic
from support.core_agent import core_agent
from support.sandbox_parts import MemoryMachine, Steps

USER = "root" if os.geteuid() == 0 else str(os.geteuid())
SPEC = MachineSpec(
    "b1", 1, 512, 64, GuestFiles(Path("k"), Path("i"), Path("t")), (), Nic(Path("n"), "tap0", "02:00"), 1000
)


@pytest.fixture(scope="module")
def agent() -> Iterator[str]:
    with core_agent() as url:
        yield url


@pytest.fixture
async def machine() -> MemoryMachine:
    return MemoryMachine(SPEC, Steps(), lambda _: None)


@pytest.fixture
async def guest(agent: str, machine: MemoryMachine) -> Guest:
    parts = urlsplit(agent)
    assert parts.hostname is not None and parts.port is not None
    return Guest(machine, parts.hostname, parts.port)


async def outcome(guest: Guest, command: Command, **given: float) -> dict[str, bytes]:
    """What a command that succeeds writes."""
    found = {"stdout": b"", "stderr": b""}

    def output(stream: str, data: bytes) -> None:
        found[stream] += data

    await guest.run(command, output, **given)
    return found


def shell(text: str, **given: str) -> Command:
    """A login shell's command, without the start-up files of whoever runs the tests: some are killed."""
    return Command.shell(text, USER, "/tmp", {"HOME": "/nowhere", **given})


async def test_a_command_s_output(guest: Guest) -> None:
    found = await outcome(guest, shell("echo $A ü; pwd; echo err >&2", A="b"))
    assert found == {"stdout": "b ü\n/tmp\n".encode(), "stderr": b"err\n"}


async def test_much_output_is_whole(guest: Guest) -> None:
    found = await outcome(guest, shell("head -c 3000000 /dev/zero; head -c 1000 /dev/zero >&2"))
    assert (len(found["stdout"]), len(found["stderr"])) == (3_000_000, 1000)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (shell("exit 3"), "exit status 3"),
        (shell("kill -9 $$"), "signal: killed"),
        (Command.shell("true", "root123"), "command failed: unauthenticated: invalid username: 'root123'"),
        (
            Command.shell("true", USER, "/missing"),
            "command failed: invalid_argument: cwd '/missing' does not",
        ),
        (Command(("/missing",), USER), "command failed: invalid_argument: error starting process '/missing'"),
    ],
)
async def test_failures_in_e2b_s_words(guest: Guest, command: Command, words: str) -> None:
    with pytest.raises(CommandFailed) as caught:
        await outcome(guest, command)
    assert str(caught.value).startswith(words)


async def test_a_command_has_its_time(guest: Guest, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="deadline_exceeded"):
        await outcome(guest, shell(f"sleep 100; touch {tmp_path}/late"), limit_s=0.2)
    assert not (tmp_path / "late").exists()


async def test_a_machine_that_ends_ends_the_wait(
    guest: Guest, machine: MemoryMachine, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    waiting = asyncio.create_task(outcome(guest, shell(f"echo begun > {fifo}; exec sleep 60"), limit_s=60))
    assert await asyncio.to_thread(fifo.read_text) == "begun\n"
    machine.die()
    with pytest.raises(GuestFault, match="crashed: signal 11; last on the console: last line"):
        await waiting


async def test_files_there_and_back(guest: Guest, tmp_path: Path) -> None:
    if USER != "root":
        pytest.skip("files are put as root")
    content = os.urandom(1_000_000)
    path = str(tmp_path / "deep er" / "ü")
    await guest.put(path, io.BytesIO(content + b"more"), len(content))

    async def whole(body: AsyncIterator[bytes]) -> bytes:
        return b"".join([part async for part in body])

    assert await guest.fetch(path, whole) == content
    with pytest.raises(GuestFault, match="cannot be read: 404"):
        await guest.fetch(f"{path}.missing", whole)
    with pytest.raises(GuestFault, match="5 bytes less"):
        await guest.put(path, io.BytesIO(b"short"), 10)
    with pytest.raises(GuestFault, match="cannot be put"):
        await guest.put(str(tmp_path), io.BytesIO(b"x"), 1)


# Start commands


async def started(guest: Guest, wanted: Start, **given: float) -> list[tuple[str, str]]:
    """What is told of a start."""
    told: list[tuple[str, str]] = []

    def output(what: str) -> Output:
        return lambda stream, data: told.append((what, data.decode()))

    await starting.start(guest, wanted, lambda *entry: told.append(entry), output, **given)
    return told


SETTINGS = GuestSettings({"A": "b", "HOME": "/nowhere"}, USER, "/tmp")


async def test_what_was_started_goes_on(guest: Guest, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = f"echo up $A; touch {tmp_path}/up; read line < {fifo}; echo $line > {tmp_path}/said"
    told = await started(guest, Start(command, f"test -e {tmp_path}/up", SETTINGS))
    assert told[-1] == ("info", "Template is ready")
    await asyncio.to_thread(fifo.write_text, "later\n")
    await outcome(guest, shell(f"until grep -q later {tmp_path}/said 2>/dev/null; do sleep 0.01; done"))


async def test_it_is_tried_until_it_is_ready(guest: Guest, tmp_path: Path) -> None:
    ready = f"echo x >> {tmp_path}/tries; test $(wc -l < {tmp_path}/tries) = 3"
    told = await started(guest, Start("", ready, SETTINGS))
    assert [entry for entry in told if entry[0] == "debug"] == [
        ("debug", "Template is not ready: exit status 1")
    ] * 2


async def test_a_start_command_that_ends_well_is_waited_past(guest: Guest) -> None:
    assert ("start", "hello\n") in await started(guest, Start("echo hello", "sleep 0.3", SETTINGS))


async def test_one_that_fails_is_told(guest: Guest) -> None:
    with pytest.raises(GuestFault, match="start command failed: exit status 7"):
        await started(guest, Start("exit 7", "false", SETTINGS))


async def test_one_that_is_never_ready(guest: Guest) -> None:
    with pytest.raises(GuestFault, match=r"timed out after 0\.5 s: false"):
        await started(guest, Start("", "false", SETTINGS), limit_s=0.5)
