"""What can go: layers by reference count. Decided here from records and a listing; nothing is done."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from agentenv.snapshot.records import ROOT, Snapshot


@dataclass(frozen=True)
class Garbage:
    """What a collection removes: files (relative to the data directory), their bytes on the disk, and
    the records of deleted snapshots of which nothing is left."""

    files: tuple[str, ...]
    bytes: int
    records: tuple[str, ...]


def plan(
    records: Iterable[Snapshot],
    in_use: Collection[str],
    kept: Collection[str],
    present: Mapping[str, int],
) -> Garbage:
    """What nobody refers to.

    A record refers to all its files while it is not deleted, or in use. Deleted records go when the last
    of their files does, so that what was built on them can still tell its descent.

    Args:
        records: all there are, deleted ones included.
        in_use: ids of snapshots that count as not deleted.
        kept: files that are needed besides.
        present: the files in the directories of recorded snapshots, with their bytes on the disk.
    """
    records = list(records)
    needed = set(kept)
    for record in records:
        if record.deleted_at is None or record.id in in_use:
            needed |= record.parts()
    files = tuple(sorted(path for path in present if path not in needed))
    left = {path.split("/")[1] for path in needed if path.startswith(f"{ROOT}/")}
    gone = tuple(
        record.id
        for record in records
        if record.deleted_at is not None and record.id not in in_use and record.id not in left
    )
    return Garbage(files, sum(present[path] for path in files), gone)


def users(records: Iterable[Snapshot], path: str) -> tuple[str, ...]:
    """The snapshots that need a file, deleted ones whose layers are still there included."""
    return tuple(record.id for record in records if path in record.parts())
