"""Directories of snapshots on the filesystem: synced, measured, removed. All functions block."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from agentenv.errors import StoreFault
from agentenv.vmm.stored import unwritable


def sync(paths: Iterable[Path]) -> None:
    """Make files and directories survive the host.

    Raises:
        StoreFull, StoreFault: one could not be written.
    """
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise unwritable(path, error) from error


def whole(directory: Path) -> list[Path]:
    """The files of a directory, and then itself, in the order to sync them."""
    return [*sorted(directory.iterdir()), directory]


def remove(path: Path) -> None:
    """Remove a directory with all that is in it; one that is gone is fine.

    Raises:
        StoreFault: something resists.
    """
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StoreFault(f"{path} cannot be removed: {error.strerror}") from error


def remove_files(home: Path, paths: Iterable[str], directories: Iterable[str] = ()) -> None:
    """Remove files by their paths relative to `home`, and directories that this leaves empty, or that are
    empty of those given.

    Raises:
        StoreFault: something resists.
    """
    parents = {home / name for name in directories}
    for path in paths:
        try:
            (home / path).unlink(missing_ok=True)
        except OSError as error:
            raise StoreFault(f"{home / path} cannot be removed: {error.strerror}") from error
        parents.add((home / path).parent)
    for parent in parents:
        try:
            parent.rmdir()
        except OSError:
            pass  # other layers are left in it


def sizes(home: Path, root: str, directories: Iterable[str]) -> dict[str, int]:
    """The files in directories below `root`, relative to `home`, with the bytes they take on the disk."""
    found = {}
    for name in directories:
        with suppress(FileNotFoundError), os.scandir(home / root / name) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # removed meanwhile
                    found[f"{root}/{name}/{entry.name}"] = entry.stat(follow_symlinks=False).st_blocks * 512
    return found
