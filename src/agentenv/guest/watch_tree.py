"""A watched directory, with everything below it when recursive, and its events in E2B's terms.

The kernel watches single directories. A recursive watch therefore adds a watch for each directory
that appears, and what came into it before the watch did is told as created, and as written if it is
a file with content; a directory renamed within the tree keeps its watches under the new name, one
that is moved out loses them.
"""

from __future__ import annotations

import os

from agentenv.guest.lean import deque
from agentenv.guest.loop import checkpoint
from agentenv.guest.watch_inotify import (
    ATTRIB,
    CREATE,
    DELETE,
    DELETE_SELF,
    IGNORED,
    IS_DIRECTORY,
    MODIFY,
    MOVE_SELF,
    MOVED_FROM,
    MOVED_TO,
    OVERFLOW,
    Event,
    Inotify,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    # Path relative to the watched directory ("." for itself), and the event's type.
    Change = tuple[str, str]

CREATED = "EVENT_TYPE_CREATE"
WRITTEN = "EVENT_TYPE_WRITE"
REMOVED = "EVENT_TYPE_REMOVE"
RENAMED = "EVENT_TYPE_RENAME"
CHANGED_MODE = "EVENT_TYPE_CHMOD"

# One event of the kernel's can stand for several of E2B's: in this order, which is E2B's.
_TYPES = (
    (CREATE | MOVED_TO, CREATED),
    (MOVED_FROM | MOVE_SELF, RENAMED),
    (ATTRIB, CHANGED_MODE),
    (MODIFY, WRITTEN),
    (DELETE | DELETE_SELF, REMOVED),
)

# What the kernel makes up as one looks, and inotify does not tell of.
_KERNEL_TREES = frozenset(("/proc", "/sys"))

# Directory entries looked at before others may run.
_BATCH = 256


class WatchLost(Exception):
    """Events came faster than they were read, and the kernel dropped some."""


class TreeWatch:
    """The changes of one directory, or of a tree.

    `open_tree` makes one that is complete; a new one alone sees only the root.

    Args:
        root: an absolute path of a directory; a link is followed.
        recursive: whether directories below it count.

    Raises:
        OSError: the directory cannot be watched, or a limit is reached.
    """

    def __init__(self, root: str, *, recursive: bool) -> None:
        self.root = root
        self._prefix = root.rstrip("/") + "/"
        self._recursive = recursive
        self._inotify = Inotify()
        self._paths: dict[int, str] = {}
        self._moving: dict[int, str] = {}
        self._told: set[str] = set()
        try:
            self._root_watch = self._inotify.add(root, follow=True)
        except BaseException:
            self._inotify.close()
            raise
        self._paths[self._root_watch] = ""

    @property
    def fd(self) -> int:
        """Readable when there are changes."""
        return self._inotify.fd

    def read(self) -> list[Change]:
        """All changes since the last call, in order.

        Raises:
            WatchLost: some are missing; the watch is of no more use.
            OSError: a new directory cannot be watched: a limit is reached.
        """
        changes: list[Change] = []
        while events := self._inotify.read():
            for event in events:
                self._take(event, changes)
        # Whatever happened before the newest watch was added has been read by now.
        self._told.clear()
        return changes

    def close(self) -> None:
        """Stop watching. No effect when repeated."""
        self._inotify.close()

    def adopt(self, top: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Watch the directories below `top` ("" for the root), and yield all that is in them.

        Parents come before children. What vanishes meanwhile is passed over.
        """
        pending = deque([top])
        while pending:
            directory = pending.popleft()
            try:
                entries = sorted(os.scandir(self._prefix + directory), key=_name)
            except OSError:
                continue  # gone again, or another user's FUSE mount: nothing to be seen there
            for entry in entries:
                path = f"{directory}/{entry.name}" if directory else entry.name
                if entry.is_dir(follow_symlinks=False) and self._watch_directory(path):
                    pending.append(path)
                yield path, entry

    def _take(self, event: Event, changes: list[Change]) -> None:
        mask = event.mask
        if mask & OVERFLOW:
            raise WatchLost("file events came faster than they were read: some are lost")
        if self._moving and not (mask & MOVED_TO and event.cookie in self._moving):
            # The two halves of a rename follow each other: it went elsewhere.
            self._forget_moved()
        if mask & IGNORED:
            self._paths.pop(event.watch, None)
            return
        directory = self._paths.get(event.watch)
        if directory is None:
            return
        if not event.name:
            # A directory below the root is told by the one that holds it.
            if event.watch == self._root_watch:
                _tell(mask, ".", changes)
            return
        path = f"{directory}/{event.name}" if directory else event.name
        if mask & CREATE and path in self._told:
            self._told.discard(path)
            return
        _tell(mask, path, changes)
        if mask & (DELETE | MOVED_FROM):
            self._told.discard(path)
        if self._recursive and mask & IS_DIRECTORY:
            self._follow(event, path, changes)

    def _follow(self, event: Event, path: str, changes: list[Change]) -> None:
        """Keep the watches of the tree true to a directory's appearance or move."""
        if event.mask & MOVED_FROM:
            self._moving[event.cookie] = path
        elif event.mask & MOVED_TO and event.cookie in self._moving:
            origin = self._moving.pop(event.cookie)
            for watch, watched in self._within(origin):
                self._paths[watch] = path + watched[len(origin) :]
        elif event.mask & (CREATE | MOVED_TO) and self._watch_directory(path):
            for below, entry in self.adopt(path):
                self._told.add(below)
                changes.append((below, CREATED))
                if event.mask & CREATE and _has_content(entry):
                    changes.append((below, WRITTEN))

    def _forget_moved(self) -> None:
        for origin in self._moving.values():
            for watch, _ in self._within(origin):
                self._inotify.remove(watch)
                del self._paths[watch]
        self._moving.clear()

    def _within(self, top: str) -> list[tuple[int, str]]:
        below = top + "/"
        return [(watch, path) for watch, path in self._paths.items() if path == top or path.startswith(below)]

    def _watch_directory(self, path: str) -> bool:
        if self._prefix + path in _KERNEL_TREES:
            return False
        try:
            self._paths[self._inotify.add(self._prefix + path)] = path
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return False
        return True


async def open_tree(root: str, *, recursive: bool) -> TreeWatch:
    """A watch of `root`; recursive ones hold everything below it when this returns.

    Raises:
        OSError: the directory cannot be watched, or a limit is reached.
    """
    tree = TreeWatch(root, recursive=recursive)
    try:
        if recursive:
            for seen, _ in enumerate(tree.adopt("")):
                if seen % _BATCH == _BATCH - 1:
                    await checkpoint()
    except BaseException:
        tree.close()
        raise
    return tree


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _has_content(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_size > 0
    except OSError:  # gone again
        return False


def _tell(mask: int, path: str, changes: list[Change]) -> None:
    for bits, kind in _TYPES:
        if mask & bits:
            changes.append((path, kind))
