"""Where a system is installed: in memory if there is plenty, since packages are thousands of small files.

Measured on a busy host with 2 cores: unpacking and installing the essential packages of `base` took
24 s on a disk, and 9 to 13 s in memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
ROOM_NEEDED = 1 << 30  # bytes; `base` takes a third of it
MEMORY_LEFT = 2 << 30  # bytes that must be available to others even if all of the room is used


@dataclass(frozen=True)
class Memory:
    """What decides: free bytes in the memory filesystem, available bytes of the host, and its mount flags."""

    room: int
    available: int
    flags: int


def suits(memory: Memory) -> bool:
    """Whether a system can be installed there; its programs are run in the course of it."""
    enough = memory.room >= ROOM_NEEDED and memory.available >= ROOM_NEEDED + MEMORY_LEFT
    return enough and not memory.flags & os.ST_NOEXEC


def available_memory(meminfo: str) -> int:
    """Bytes that /proc/meminfo says can be used without swapping; 0 if it does not say."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def in_memory(build_id: str) -> Path | None:
    """A path in memory for a build's private directory, or None where that would not do."""
    if not SHARED_MEMORY.is_mount():
        return None
    status = os.statvfs(SHARED_MEMORY)
    available = available_memory(Path("/proc/meminfo").read_text())
    memory = Memory(status.f_bavail * status.f_frsize, available, status.f_flag)
    return SHARED_MEMORY / f"aenv-build-{build_id}" if suits(memory) else None
