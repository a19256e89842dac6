"""What a machine's process holds and has used, as its host sees it: the guest is not asked."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentenv import proc

MIB = 1 << 20


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
    fields = proc.stat(pid)
    try:
        status = _sizes(Path(f"/proc/{pid}/status").read_text())
        moved = _moved(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    if not fields:
        return None
    ticks = int(fields[11]) + int(fields[12])  # utime and stime of proc(5)
    return Usage(
        own=status.get("RssAnon", 0) * 1024,
        resident=status.get("VmRSS", 0) * 1024,
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        read=moved.get("read_bytes", 0),
        written=moved.get("write_bytes", 0),
    )


def usages(pids: Iterable[int]) -> dict[int, Usage]:
    """Those of many, without the ones that are gone."""
    return {pid: usage for pid in pids if (usage := usage_of(pid)) is not None}


def _moved(pid: int) -> dict[str, int]:
    try:
        return _sizes(Path(f"/proc/{pid}/io").read_text())
    except PermissionError:  # another user's, as for a node that is not root's
        return {}


def _sizes(text: str) -> dict[str, int]:
    """Lines `name: number` as numbers."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdecimal():
            found[name] = int(number[0])
    return found
