"""Records of snapshots against the files there are. All functions block and change nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import StoreFault
from agentenv.progress import Progress, Tally, silent
from agentenv.snapshot.records import ROOT, MemoryDelta, Snapshot, StoredFile
from agentenv.vmm.layer import read_map
from agentenv.vmm.stored import digest_of
from agentenv.vmm.transfer import PAGE


@dataclass(frozen=True)
class Problem:
    """What is wrong with a file, relative to the data directory, and which snapshots it concerns."""

    path: str
    what: str
    snapshots: tuple[str, ...] = ()


def examine(
    home: Path,
    records: Iterable[Snapshot],
    held: Collection[str],
    *,
    digests: bool = False,
    progress: Progress = silent,
) -> Iterator[Problem]:
    """Problems of the files that snapshots need, each file looked at once; `progress` is told how far the
    reading of them is, which takes long with `digests` alone."""
    needed: dict[str, tuple[StoredFile, list[str]]] = {}
    for record in records:
        if record.deleted_at is None or record.id in held:
            for file in record.files():
                needed.setdefault(file.path, (file, []))[1].append(record.id)
    read = Tally("reading snapshots", sum(file.bytes for file, _ in needed.values()), progress)
    for file, ids in needed.values():
        problem = file_problem(home, file) or (digests and content_problem(home, file))
        read.add(file.bytes)
        if problem:
            yield Problem(problem.path, problem.what, tuple(ids))


def file_problem(home: Path, file: StoredFile) -> Problem | None:
    """Whether a file is missing or has another length than its record says."""
    for part in file.parts:
        try:
            size = (home / part).stat().st_size
        except OSError as error:
            return Problem(part, "is missing" if isinstance(error, FileNotFoundError) else str(error))
        if part == file.path and size != file.bytes:
            return Problem(part, f"has {size} bytes, not the {file.bytes} of its record")
    return None


def content_problem(home: Path, file: StoredFile) -> Problem | None:
    """Whether a file has other content than its digest says, or a map that cannot be used."""
    try:
        if isinstance(file, MemoryDelta) and len(read_map(home / file.path)[0]) * PAGE != file.bytes:
            return Problem(file.path, "has another map than its length needs")
        if file.digest is None or digest_of(*(home / part for part in file.parts)) == file.digest:
            return None
    except StoreFault as error:
        return Problem(file.path, f"cannot be used: {error.message}")
    return Problem(file.path, "has other content than when it was stored")


def stray(home: Path, known: Collection[str]) -> Iterator[Problem]:
    """What lies among the snapshots and belongs to no record."""
    root = home / ROOT
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if path.name not in known:
            yield Problem(f"{ROOT}/{path.name}", "belongs to no snapshot")
