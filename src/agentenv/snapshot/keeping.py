"""What is kept to be used again, within a budget and an age: steps of builds, and first snapshots of other
sizes than their template's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentenv.snapshot.records import Snapshot


@dataclass(frozen=True)
class Kept:
    """Something that is kept: the bytes on the disk that its snapshot added, and when it was last used,
    seconds since the epoch."""

    key: str
    bytes: int
    used_at: float


def excess(kept: Iterable[Kept], budget: int, keep_s: float, now: float) -> tuple[Kept, ...]:
    """What is to go, the longest unused first, so that the rest was used within `keep_s` seconds
    and takes at most `budget` bytes."""
    gone: list[Kept] = []
    total = 0
    for each in sorted(kept, key=lambda one: one.used_at, reverse=True):
        total += each.bytes
        if total > budget or each.used_at < now - keep_s:
            gone.append(each)
    return tuple(reversed(gone))


def bytes_added(home: Path, record: Snapshot) -> int:
    """Bytes on the disk of the files that a snapshot added."""
    return sum(_blocks(home / path) for path in record.own_parts())


def _blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
