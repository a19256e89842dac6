"""Who freezes and who thaws: with stand-ins for the two system calls, which are tried in a real guest."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.guest import freeze, loop
from agentenv.guest.freeze import Freezer

Body = Callable[[Freezer, socket.socket, socket.socket], Coroutine[Any, Any, None]]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What was done, by whoever did it."""
    path = tmp_path / "log"
    path.touch()

    def note(word: str) -> None:
        with path.open("a") as file:
            file.write(f"{word}\n")

    def frozen(_directory: int) -> bool:
        note(f"freeze {os.getpid()}")
        return True

    monkeypatch.setattr(freeze, "freeze", frozen)
    monkeypatch.setattr(freeze, "thaw", lambda _directory: note("thaw"))
    before = children()  # of other tests in this process
    yield path
    for child in children() - before:
        os.waitpid(child, 0)


def children() -> set[int]:
    return {int(pid) for pid in Path("/proc/thread-self/children").read_text().split()}


def run(tmp_path: Path, body: Body, limit: float = 60.0) -> None:
    """A freezer in the agent's loop, and both ends of a connection."""

    def find() -> list[int]:
        return [os.open(tmp_path, os.O_RDONLY | os.O_CLOEXEC)]

    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            await body(Freezer(find, limit), ours, theirs)

    before = len(os.listdir("/proc/self/fd"))
    loop.run(main())
    assert len(os.listdir("/proc/self/fd")) == before


def lines(log: Path) -> list[str]:
    return [line.split()[0] for line in log.read_text().splitlines()]


async def until_thawed(freezer: Freezer) -> None:
    await freezer._over.wait()


def test_it_is_frozen_when_answered_and_thawed_when_asked(log: Path, tmp_path: Path) -> None:
    async def body(freezer: Freezer, ours: socket.socket, theirs: socket.socket) -> None:
        for number in range(1, 3):
            await freezer.freeze(ours.fileno())
            assert lines(log) == ["freeze", "thaw"] * (number - 1) + ["freeze"]
            assert str(os.getpid()) not in log.read_text().split()
            await freezer.thaw()
            assert lines(log) == ["freeze", "thaw"] * number
        await freezer.thaw()
        assert lines(log) == ["freeze", "thaw"] * 2

    run(tmp_path, body)


def test_a_second_freeze_begins_with_a_thaw(log: Path, tmp_path: Path) -> None:
    async def body(freezer: Freezer, ours: socket.socket, theirs: socket.socket) -> None:
        await freezer.freeze(ours.fileno())
        await freezer.freeze(ours.fileno())
        assert lines(log) == ["freeze", "thaw", "freeze"]
        await freezer.thaw()

    run(tmp_path, body)


def test_the_end_of_the_connection_thaws(log: Path, tmp_path: Path) -> None:
    async def body(freezer: Freezer, ours: socket.socket, theirs: socket.socket) -> None:
        await freezer.freeze(ours.fileno())
        theirs.close()
        await until_thawed(freezer)
        assert lines(log) == ["freeze", "thaw"]

    run(tmp_path, body)


def test_time_thaws(log: Path, tmp_path: Path) -> None:
    async def body(freezer: Freezer, ours: socket.socket, theirs: socket.socket) -> None:
        await freezer.freeze(ours.fileno())
        await until_thawed(freezer)
        assert lines(log) == ["freeze", "thaw"]

    run(tmp_path, body, limit=0.05)


def test_where_the_child_is_killed_the_agent_thaws(log: Path, tmp_path: Path) -> None:
    async def body(freezer: Freezer, ours: socket.socket, theirs: socket.socket) -> None:
        await freezer.freeze(ours.fileno())
        os.kill(int(log.read_text().split()[1]), signal.SIGKILL)
        await until_thawed(freezer)
        assert lines(log) == ["freeze", "thaw"]

    run(tmp_path, body)


def test_what_cannot_be_frozen_is_written_out(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freeze, "freeze", lambda _directory: False)

    async def body(freezer: Freezer, ours: socket.socket, theirs: socket.socket) -> None:
        await freezer.freeze(ours.fileno())
        await until_thawed(freezer)
        assert lines(log) == []

    run(tmp_path, body)


def test_a_machine_that_is_not_ours_is_never_frozen() -> None:
    assert freeze.root() is None
    assert freeze.captured() == []
