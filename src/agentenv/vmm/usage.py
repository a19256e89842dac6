"""What a machine's process holds and has used, as its host sees it: the guest is not asked."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """Bytes of memory that no other process shares (`own`) and in all (`resident`), seconds of processor time
    so far, and bytes that storage was asked to read and write."""

    own: int
    resident: int
    cpu_s: float
    read: int = 0
    written: int = 0

    @property
    def own_mib(self) -> int:
        """The memory of its own in whole MiB."""
        return self.own // MIB


def usage_of(pid: int) -> Usage | None:
    """The usage of a process (proc(5)); None when it is gone."""
    try:
        stat, memory, moved = _read(pid, "stat"), _read(pid, "statm"), _moved(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    times = stat[stat.rindex(b")") + 2 :].split()
    pages = memory.split(maxsplit=3)
    resident = int(pages[1])
    return Usage(
        own=(resident - int(pages[2])) * _PAGE,  # without files and shared memory
        resident=resident * _PAGE,
        cpu_s=(int(times[11]) + int(times[12])) / _TICKS,  # utime and stime
        read=moved.get(b"read_bytes", 0),
        written=moved.get(b"write_bytes", 0),
    )


def usages(pids: Iterable[int]) -> dict[int, Usage]:
    """Those of many, without the ones that are gone."""
    return {pid: usage for pid in pids if (usage := usage_of(pid)) is not None}


def _moved(pid: int) -> dict[bytes, int]:
    try:
        lines = _read(pid, "io").splitlines()
    except PermissionError:  # another user's, as for a node that is not root's
        return {}
    return {name: int(number) for name, _, number in (line.partition(b": ") for line in lines)}


def _read(pid: int, name: str) -> bytes:
    """A small file of a process: with hundreds of them, the layers of a file object are half of the time."""
    file = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)
