"""Data directories for tests: copies of the prepared one that cost links, not bytes."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from agentenv import config
from agentenv.records.database import Database
from support.running import RunningNode

BASE = "SELECT id FROM snapshots WHERE kind = 'template' AND deleted_at IS NULL AND expires_at IS NULL"


def prepared_home() -> Path:
    """The data directory that `scripts/test` prepared: guest files and the template `base`."""
    home = config.load().home
    if os.geteuid() != 0:
        pytest.fail("tests of real machines need root: run scripts/test")
    if not (home / "aenv.db").exists() or not (home / "guest").is_dir():
        pytest.fail(f"{home} is not set up: run scripts/test, which prepares it")
    return home


def linked_home(target: Path) -> Path:
    """A data directory of its own with the prepared guest files and templates, which are booted already, and
    no past."""
    source = prepared_home()
    first = _first_snapshots(source)
    target.mkdir(parents=True)
    for name in ("guest", "images", *(f"snapshots/{each}" for each in first)):
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, copy_function=os.link, symlinks=True)
    _copy_records(source, target, keep=first)
    return target


def _first_snapshots(home: Path) -> list[str]:
    """Those of a prepared home's templates; the first who asks has a node boot `base`, which takes seconds
    that otherwise each node of a test would take."""
    with (home / "first.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (found := _ids(home)):
            runtime = Path(f"/run/aenv-t-{os.getpid()}-first")
            node = RunningNode(home, runtime, home / "first.log", port="0", pool_most="0")
            try:
                node.sandbox("base").kill()
            finally:
                node.close()
            found = _ids(home)
    return found


def _ids(home: Path) -> list[str]:
    with closing(sqlite3.connect(f"file:{home}/aenv.db?mode=ro", uri=True)) as database:
        return [row[0] for row in database.execute(BASE)]


@contextmanager
def small_home(target: Path, size: int) -> Iterator[Path]:
    """The same on a filesystem of its own, of `size` bytes; only guest files and images lie elsewhere."""
    source, image = prepared_home(), target.with_suffix(".ext4")
    target.mkdir(parents=True)
    try:
        with image.open("wb") as file:
            file.truncate(size)
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        _run("mount", "-o", "loop", str(image), str(target))
        for name in ("guest", "images"):
            (target / name).mkdir()
            _run("mount", "--bind", str(source / name), str(target / name))
        _copy_records(source, target)
        yield target
    finally:
        unmount_below(target)
        image.unlink()


def unmount_below(directory: Path) -> None:
    """Unmount all that is mounted at a directory or below it."""
    points = [Path(line.split()[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed(points):
        if point.is_relative_to(directory):
            _run("umount", str(point))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def _copy_records(source: Path, target: Path, keep: Sequence[str] = ()) -> None:
    original, copy = sqlite3.connect(source / "aenv.db"), sqlite3.connect(target / "aenv.db")
    try:
        original.backup(copy)
        Database(target / "aenv.db").close()  # of this version, whichever the prepared one is
        for table in ("resources", "sandboxes", "idempotency", "snapshot_names"):
            copy.execute(f"DELETE FROM {table}")
        kept = ", ".join("?" * len(keep))
        copy.execute(f"DELETE FROM snapshots WHERE id NOT IN ({kept})", tuple(keep))
        moved = "json_set(document, '$.made.rootfs', replace(document ->> '$.made.rootfs', ?, ?))"
        copy.execute(f"UPDATE builds SET document = {moved}", (str(source), str(target)))
        copy.commit()
    finally:
        original.close()
        copy.close()
