"""What the cache lets go of: the least recently used of what nothing needs, down to the budget."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentenv.records.database import Database

# What was used so lately may be on its way into a record.
GRACE_S = 600.0
_NAMED = re.compile(r"images/cache/([^\"/]+/[^\"/]+\.ext4)")


@dataclass(frozen=True)
class Kept:
    """A file in the cache or the store of blobs: bytes on the disk, and when it was last used (s)."""

    path: Path
    size: int
    used: float


def plan(files: Iterable[Kept], needed: Collection[Path], budget: int, now: float) -> tuple[Kept, ...]:
    """What goes, so that what nothing needs takes at most `budget` bytes; least recently used first."""
    loose = sorted((kept for kept in files if kept.path not in needed), key=lambda kept: kept.used)
    total = sum(kept.size for kept in loose)
    going = []
    for kept in loose:
        if total <= budget or kept.used > now - GRACE_S:
            break
        total -= kept.size
        going.append(kept)
    return tuple(going)


def named_in_records(database: Database) -> frozenset[str]:
    """The root filesystems (`DIRECTORY/NAME.ext4`) that any record names: templates, snapshots (deleted ones
    too, until they are cleared away), sandboxes, and what the ledger has."""
    rows = database.query(
        "SELECT document AS text FROM builds UNION ALL SELECT document FROM snapshots"
        " UNION ALL SELECT document FROM sandboxes UNION ALL SELECT name || ' ' || detail FROM resources"
    )
    return frozenset(name for row in rows for name in _NAMED.findall(row["text"]))


def present(cache: Path, store: Path) -> list[Kept]:
    """The root filesystems in the cache, and whole and partial blobs. Blocking."""
    found = []
    for path in (*cache.glob("*-*/*.ext4"), *store.glob("sha256/*"), *store.glob("partial/*")):
        with suppress(FileNotFoundError):
            status = path.stat()
            found.append(Kept(path, status.st_blocks * 512, status.st_mtime))
    return found


def remove(going: Iterable[Kept]) -> tuple[Path, ...]:
    """Remove what was not used since the plan was made; returns what went. Blocking."""
    gone = []
    for kept in going:
        try:
            if kept.path.stat().st_mtime != kept.used or _is_locked(kept.path):
                continue
            kept.path.unlink()
        except FileNotFoundError:
            continue
        gone.append(kept.path)
        if kept.path.suffix == ".ext4" and not any(kept.path.parent.glob("*.ext4")):
            (kept.path.parent / "image.json").unlink(missing_ok=True)
            with suppress(OSError):  # another one was published there just now
                kept.path.parent.rmdir()
    return tuple(gone)


def _is_locked(path: Path) -> bool:
    """Whether somebody fetches this blob."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def prune_pointers(cache: Path) -> None:
    """Remove pointers to contents of which nothing is left and that are old. Blocking."""
    for path in cache.glob("pointers/*"):
        with suppress(FileNotFoundError):
            text = path.read_text()
            digests = re.findall(r'"digest": "sha256:([0-9a-f]+)"', text)
            if not any(any(cache.glob(f"*-{digest}")) for digest in digests):
                path.unlink()
