"""Trees of files: listing them in order, and removing them.

Both are generators, so that their user can let others run in between.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def walk(root: str, depth: int) -> Iterator[str]:
    """Paths below `root`, relative to it: each directory before what is in it, names in byte order.

    Links are not followed. What vanishes meanwhile is passed over.

    Args:
        root: a directory.
        depth: how many levels; 1 for the directory's own entries.

    Raises:
        OSError: a directory cannot be read.
    """
    pending = [_entries(root, "")]
    while pending:
        following = next(pending[-1], None)
        if following is None:
            pending.pop()
            continue
        path, is_directory = following
        yield path
        if is_directory and len(pending) < depth:
            pending.append(_entries(root, path))


def _entries(root: str, below: str) -> Iterator[tuple[str, bool]]:
    try:
        with os.scandir(f"{root}/{below}") as listing:
            found = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in listing]
    except (FileNotFoundError, NotADirectoryError):
        return
    prefix = f"{below}/" if below else ""
    for name, is_directory in sorted(found):
        yield prefix + os.fsdecode(name), is_directory


def remove_tree(path: str) -> Iterator[None]:
    """Remove `path` and all below it, yielding after each removal. Nothing, when there is nothing.

    Works relative to open directories and never follows a link: the agent is root, and the tree may
    belong to somebody who changes it meanwhile.

    Raises:
        OSError: something cannot be removed; what went before is gone.
    """
    path = path.rstrip("/") or "/"
    try:
        directory = os.open(os.path.dirname(path) or "/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        yield from _Removal(directory).run(os.path.basename(path))
    finally:
        os.close(directory)


class _Removal:
    """One removal. Only the directory at work is open, so that depth costs no descriptors."""

    def __init__(self, directory: int) -> None:
        self._top = directory

    def run(self, name: str) -> Iterator[None]:
        """Remove `name` in the directory given."""
        if _unlink(name, self._top):
            yield
            return
        # Each level: its identity, the names still to remove, and its own name in the level above.
        levels: list[tuple[tuple[int, int], list[str], str]] = []
        current = _enter(name, self._top)
        try:
            levels.append((_identity(current), os.listdir(current), name))
            while levels:
                _, names, own = levels[-1]
                if names:
                    child = names.pop()
                    if _unlink(child, current):
                        yield
                        continue
                    inner = _enter(child, current)
                    os.close(current)
                    current = inner
                    levels.append((_identity(current), os.listdir(current), child))
                    continue
                levels.pop()
                if levels:
                    outer = os.open("..", _DIRECTORY, dir_fd=current)
                    os.close(current)
                    current = outer
                    if _identity(current) != levels[-1][0]:
                        raise OSError(16, "the tree was moved while it was being removed", own)
                    _rmdir(own, current)
                else:
                    _rmdir(own, self._top)
                yield
        finally:
            os.close(current)


def _unlink(name: str, directory: int) -> bool:
    """Remove what is no directory; False when it is one. True also when it is gone already."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return True
    except (IsADirectoryError, PermissionError):
        # Linux says EISDIR, POSIX EPERM, and an immutable file EPERM as well.
        try:
            if stat.S_ISDIR(os.lstat(name, dir_fd=directory).st_mode):
                return False
        except FileNotFoundError:
            return True
        raise
    return True


def _rmdir(name: str, directory: int) -> None:
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        pass  # someone else removes the same tree


def _enter(name: str, directory: int) -> int:
    return os.open(name, _DIRECTORY, dir_fd=directory)


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
