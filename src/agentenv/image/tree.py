"""A root filesystem being put together in a private directory; nothing is written outside it.

Names come from archives that nobody vouches for. Each is taken apart and walked from the root of
the tree, a symbolic link on the way being followed as a process inside the tree would see it. The
directory must be private to this process: the walk and the use of its result are two steps.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import AenvError, HostFault, InvalidRequest, StoreCorrupt, StoreFull

LINKS_FOLLOWED = 40  # as in the kernel
ENTRIES_MAX = 2_000_000
BLOCK = 4096
_REMOVALS = 3  # of one tree, at most
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# Belongs to the host that made the archive, not to the image.
_FOREIGN_XATTRS = ("security.selinux", "security.ima", "security.evm", "trusted.overlay.", "trusted.SGI_")


@dataclass(frozen=True)
class Attributes:
    """Owner, permission bits, modification time (nanoseconds) and extended attributes of an entry."""

    uid: int
    gid: int
    mode: int
    mtime_ns: int
    xattrs: Mapping[str, bytes]


class Budget:
    """How much a tree may hold: a few bytes of archive can unpack to fill any disk."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.entries = 0

    def add(self, size: int) -> None:
        """Count bytes about to be written; one entry when `size` is 0."""
        self.used_bytes += size
        if self.used_bytes > self.limit_bytes:
            raise InvalidRequest(
                f"the image holds more than {self.limit_bytes >> 20} MiB", remedy="ask for a larger disk"
            )

    def add_entry(self) -> None:
        """Count one file, directory or other entry."""
        self.entries += 1
        if self.entries > ENTRIES_MAX:
            raise InvalidRequest(f"the image holds more than {ENTRIES_MAX} files", remedy="split the image")

    def take_back(self, status: os.stat_result) -> None:
        """Uncount an entry that is being removed."""
        self.entries -= 1
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            self.used_bytes -= status.st_blocks * 512


class Stopped(Exception):
    """The build was called off; never leaves the room."""


def clean(name: str) -> str:
    """A member's name as a path relative to the root of the tree; empty for the root itself.

    Raises:
        StoreCorrupt: it climbs with `..`, which no tool that makes images writes.
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise StoreCorrupt(
            f"the archive names {name!r}, a path out of its tree", remedy="do not use an image from there"
        )
    return "/".join(parts)


class Tree:
    """The directory `root` and what may be done in it. Paths are relative to it, without links."""

    def __init__(self, root: Path, budget: Budget, stop: threading.Event | None = None) -> None:
        self.root = root
        self.budget = budget
        self._stop = stop or threading.Event()
        self._real: dict[str, str] = {}

    def check(self) -> None:
        """Raise `Stopped` if the build was called off."""
        if self._stop.is_set():
            raise Stopped

    def at(self, relative: str) -> str:
        """The path on this host."""
        return f"{self.root}/{relative}" if relative else str(self.root)

    def directory(self, path: str, *, make: bool) -> str | None:
        """The directory that `path` leads to, links followed inside the tree; None if there is none.

        With `make`, missing ones are made (root's, mode 0755).
        """
        known = self._real.get(path)
        if known is None:
            known = self._walk(path, make)
            if known is not None:
                self._real[path] = known
        return known

    def _walk(self, path: str, make: bool) -> str | None:
        done: list[str] = []
        ahead = deque(path.split("/"))
        links = 0
        while ahead:
            part = ahead.popleft()
            if part in ("", "."):
                continue
            if part == "..":
                del done[-1:]
                continue
            here = "/".join([*done, part])
            try:
                mode = os.lstat(self.at(here)).st_mode
            except FileNotFoundError:
                if not make:
                    return None
                self.make_directory(here)
                mode = stat.S_IFDIR
            if stat.S_ISDIR(mode):
                done.append(part)
            elif stat.S_ISLNK(mode) and (links := links + 1) <= LINKS_FOLLOWED:
                target = os.readlink(self.at(here))  # noqa: PTH115
                if target.startswith("/"):
                    done.clear()
                ahead.extendleft(reversed(target.split("/")))
            elif make:
                raise StoreCorrupt(f"in the image, /{here} is no directory, and /{path} needs it to be")
            else:
                return None
        return "/".join(done)

    def make_directory(self, relative: str) -> None:
        """Make a directory that does not exist, mode 0755."""
        self.budget.add_entry()
        os.mkdir(self.at(relative))  # noqa: PTH102 - strings throughout: paths cost too much per entry
        os.chmod(self.at(relative), 0o755)  # noqa: PTH101

    def status(self, relative: str) -> os.stat_result | None:
        """The entry's own status, or None if there is none."""
        try:
            return os.lstat(self.at(relative))
        except FileNotFoundError:
            return None

    def children(self, relative: str) -> list[str]:
        """Relative paths of a directory's entries."""
        return [f"{relative}/{name}" if relative else name for name in os.listdir(self.at(relative))]  # noqa: PTH208

    def remove(self, relative: str) -> None:
        """Remove an entry and all beneath it, if it exists."""
        status = self.status(relative)
        if status is None:
            return
        self._real.clear()
        if stat.S_ISDIR(status.st_mode):
            for child in self.children(relative):
                self.remove(child)
            os.rmdir(self.at(relative))  # noqa: PTH106
        else:
            os.unlink(self.at(relative))  # noqa: PTH108
        self.budget.take_back(status)

    def create(self, relative: str) -> int:
        """A descriptor of a new file, in the place of whatever is there."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.at(relative), flags, 0o600)
        except FileExistsError:
            self.remove(relative)
            descriptor = os.open(self.at(relative), flags, 0o600)
        self.budget.add_entry()
        return descriptor

    def set_attributes(self, relative: str, wanted: Attributes, *, link: bool = False) -> None:
        """Give an entry its owner, mode, extended attributes and time, in the order that keeps all.

        (A change of owner drops set-id bits and capabilities.)
        """
        path = self.at(relative)
        os.chown(path, wanted.uid, wanted.gid, follow_symlinks=False)
        if not link:
            os.chmod(path, wanted.mode)  # noqa: PTH101
        for name, value in wanted.xattrs.items():
            if not name.startswith(_FOREIGN_XATTRS):
                _set_xattr(path, relative, name, value)
        self.set_time(relative, wanted.mtime_ns)

    def set_time(self, relative: str, mtime_ns: int) -> None:
        """Set an entry's times, both to `mtime_ns`."""
        try:
            os.utime(self.at(relative), ns=(mtime_ns, mtime_ns), follow_symlinks=False)
        except OverflowError:  # a time outside what the host can hold says nothing worth failing for
            os.utime(self.at(relative), ns=(0, 0), follow_symlinks=False)

    def clear_xattrs(self, relative: str) -> None:
        """Remove all extended attributes of an entry that gets new ones."""
        path = self.at(relative)
        for name in os.listxattr(path, follow_symlinks=False):
            if not name.startswith(_FOREIGN_XATTRS):
                os.removexattr(path, name, follow_symlinks=False)


def _set_xattr(path: str, relative: str, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EPERM):
            raise HostFault(
                f"the attribute {name} of /{relative} cannot be kept: {error.strerror}",
                remedy="build as root, with the data directory on ext4, xfs or btrfs",
            ) from error
        raise


@contextmanager
def host_faults(what: str) -> Iterator[None]:
    """Turn errors of the host's filesystem into ours.

    Raises:
        StoreFull: no space, or over quota.
        StoreCorrupt: a name that no filesystem can hold.
        HostFault: anything else that the host refused.
    """
    try:
        yield
    except AenvError:
        raise
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise StoreFull(f"no space left for {what}", remedy="free space in the data directory") from error
        if error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP):
            raise StoreCorrupt(f"{what}: {error.strerror}: {error.filename}") from error
        raise HostFault(f"{what}: {error}", remedy="build as root, in a directory of root's") from error


def remove_scratch(path: Path) -> None:
    """Remove a scratch directory, never what is mounted in it.

    Raises:
        HostFault: something is mounted there.
    """
    if not path.exists():
        return
    inside = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    mounted = [point for point in inside if Path(_unescaped(point)).is_relative_to(path)]
    if mounted:
        raise HostFault(f"{mounted[0]} is still mounted in {path}", remedy=f"umount {mounted[0]}")
    with host_faults(f"the removal of {path}"):
        _remove_tree(path)


def _remove_tree(path: Path) -> None:
    """Remove a tree. What somebody who was killed had begun to do may still come while it goes."""
    for more in reversed(range(_REMOVALS)):
        try:
            shutil.rmtree(path)
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not more:
                raise


def _unescaped(point: str) -> str:
    """A mount point as mountinfo writes it, with octal escapes for blanks."""
    return point.encode().decode("unicode_escape")
