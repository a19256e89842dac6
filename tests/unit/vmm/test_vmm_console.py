"""The bounded serial log, and copying a socket into it."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.vmm.console import Console, SerialLog

MARK = re.compile(rb"\n\[\.\.\. (\d+) bytes left out \.\.\.\]\n")


@given(st.lists(st.binary(min_size=1, max_size=3000), max_size=60), st.integers(0, 60))
def test_the_log_is_bounded_and_keeps_the_beginning_and_the_end(
    parts: list[bytes], reopen_after: int
) -> None:
    limit = 4096
    parts = [part.replace(b"\n", b".") for part in parts]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "log")
        log = SerialLog(path, limit)
        for number, part in enumerate(parts):
            if number == reopen_after:
                log.close()
                log = SerialLog(path, limit)
            log.append(part)
        log.close()
        kept, whole = path.read_bytes(), b"".join(parts)
    assert len(kept) <= limit
    mark = MARK.search(kept)
    if mark is None:
        assert kept == whole
        return
    head, tail = kept[: mark.start()], kept[mark.end() :]
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert len(head) == limit // 4
    assert len(tail) >= limit // 4
    assert len(head) + int(mark[1]) + len(tail) == len(whole)


def test_the_tail_is_the_end(tmp_path: Path) -> None:
    log = SerialLog(tmp_path / "log", 4096)
    log.append(b"one two three")
    assert log.tail(5) == b"three"
    assert log.tail(1000) == b"one two three"
    log.close()
    log.close()
    assert log.tail(5) == b""


def test_a_full_disk_loses_the_log_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SerialLog(tmp_path / "log", 4096)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        log.append(b"lost")
    log.append(b"kept")
    assert log.tail(100) == b"kept"
    log.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


async def test_what_the_guest_writes_is_kept_and_what_is_typed_arrives(
    tmp_path: Path, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    console = Console(ours, SerialLog(tmp_path / "log", 4096))
    for byte in b"booting\nready\n":
        theirs.send(bytes([byte]))
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        while "ready" not in console.tail():
            await asyncio.sleep(0.001)
    console.send(b"halt\n")
    assert theirs.recv(100) == b"halt\n"
    console.close()
    console.close()
    console.send(b"nobody hears")
    assert (tmp_path / "log").read_bytes() == b"booting\nready\n"


async def test_the_last_words_are_taken_over_when_the_other_side_is_gone(
    tmp_path: Path, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    console = Console(ours, SerialLog(tmp_path / "log", 4096))
    theirs.send(b"Kernel panic - not syncing")
    theirs.close()
    console.drain()
    assert console.tail(5) == "ncing"
    console.close()
