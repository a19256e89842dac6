"""Locks between processes: files that may be removed or renamed by whoever holds them. Blocking."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def locked(path: Path) -> IO[bytes]:
    """The file at `path`, made if missing, opened with its lock; closing it lets the lock go."""
    while True:
        file = path.open("ab+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(path, os.fstat(file.fileno())):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:
        return False


def sweep(directory: Path) -> None:
    """Remove the files of locks that nobody holds: of processes that were killed."""
    for path in directory.glob("*"):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except (FileNotFoundError, BlockingIOError):
            continue


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock that leaves no file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
