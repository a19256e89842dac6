"""Runs in the guest: puts copied files in their places, as a Dockerfile's COPY does.

    place.py STREAM DESTINATION WORKDIR OWNER MODE

STREAM is what `packing` or `collect` wrote; it is removed. DESTINATION counts from WORKDIR; OWNER is
USER[:GROUP], names or numbers, or `=` for the files' own; MODE is octal, or empty for the files' own. A
directory's content is merged into what is there: directories that exist, and links to such, stay as they are;
everything else is replaced. What is made on the way belongs to OWNER too.
"""

from __future__ import annotations

import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

_CHUNK = 256 * 1024


class Places:
    """Where files go, and whose they are: with `keep` those that the stream says, one by one."""

    def __init__(self, target: str, owner: tuple[int, int] | None, mode: int | None) -> None:
        self.target = target
        self.keep = owner is None
        self.uid, self.gid = owner or (0, 0)
        self.mode = mode
        self.made: list[tuple[str, int, int]] = []  # directories: their times are set last

    def make_directories(self, path: str) -> None:
        """Make a directory and those above it that are missing."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for each in reversed(missing):
            os.mkdir(each, 0o755)
            os.chown(each, self.uid, self.gid)

    def of(self, name: str) -> str:
        """The place of a member; an empty name is that of the one thing that is copied."""
        return os.path.join(self.target, name) if name else self.target

    def directory(self, path: str, mode: int, seconds: int) -> None:
        if os.path.isdir(path):
            return
        self.make_directories(os.path.dirname(path))
        os.mkdir(path, 0o700)
        os.chown(path, self.uid, self.gid)
        os.chmod(path, mode if self.mode is None else self.mode)
        self.made.append((path, seconds, seconds))

    def clear(self, path: str) -> None:
        """Make way for something that is no directory."""
        if os.path.isdir(path) and not os.path.islink(path):
            raise SystemExit(f"cannot copy a file over the directory {path}")
        self.make_directories(os.path.dirname(path))
        if os.path.lexists(path):
            os.unlink(path)

    def file(self, path: str, mode: int, seconds: int, size: int, stream: BinaryIO) -> None:
        self.clear(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            while size:
                data = stream.read(min(size, _CHUNK))
                if not data:
                    raise SystemExit("the files arrived incomplete")
                size -= len(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
            os.fchown(descriptor, self.uid, self.gid)
            os.fchmod(descriptor, mode if self.mode is None else self.mode)
            os.utime(descriptor, (seconds, seconds))
        finally:
            os.close(descriptor)

    def symbolic(self, path: str, link: str) -> None:
        self.clear(path)
        os.symlink(link, path)
        os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def hard(self, path: str, name: str) -> None:
        self.clear(path)
        os.link(self.of(name), path, follow_symlinks=False)

    def finish(self) -> None:
        """Set the times of what was made, which writing into it changed."""
        for path, accessed, modified in reversed(self.made):
            os.utime(path, (accessed, modified))


def ids(owner: str) -> tuple[int, int]:
    """The user and group ids of USER[:GROUP]; without a group it is the user's own."""
    user, _, group = owner.partition(":")
    rows = _rows("/etc/passwd")
    account = next((row for row in rows if row[0] == user and len(row) > 3), None)
    if account is None and user.isdigit():
        account = next((row for row in rows if len(row) > 3 and row[2] == user), None) or ["", "", user, user]
    if account is None and user == "root":
        account = ["", "", "0", "0"]
    if account is None:
        raise SystemExit(f"there is no user {user}")
    if not group:
        return int(account[2]), int(account[3])
    if group.isdigit():
        return int(account[2]), int(group)
    for row in _rows("/etc/group"):
        if row[0] == group and len(row) > 2:
            return int(account[2]), int(row[2])
    if group == user:
        return int(account[2]), int(account[3])
    raise SystemExit(f"there is no group {group}")


def _rows(path: str) -> list[list[str]]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return [line.rstrip("\n").split(":") for line in file]
    except OSError:
        return []


def target_of(destination: str, workdir: str, single: str) -> str:
    """Where a copy goes. `single` is the name of the one thing that is copied, if it is one: it goes into
    a directory under its own name."""
    path = os.path.join(workdir, destination)
    into = path.endswith(("/", "/.")) or os.path.isdir(path)
    path = os.path.normpath(path)
    return os.path.join(path, single) if single and into else path


def main(arguments: list[str]) -> None:
    """Does it; SystemExit says what is wrong."""
    stream_path, destination, workdir, owner, mode = arguments
    given = None if owner == "=" else ids(owner)
    with open(stream_path, "rb") as stream:
        os.unlink(stream_path)
        single = stream.readline().decode("utf-8", "surrogateescape").rstrip("\n").replace("\1", "\n")
        places = Places(target_of(destination, workdir, single), given, int(mode, 8) if mode else None)
        if not single:
            places.make_directories(places.target)
        while head := stream.readline().split():
            if head == [b"."]:
                places.finish()
                return
            kind = head[0]
            numbers = [int(each) for each in head[1:]]
            permissions, seconds, uid, gid, name_length, link_length, size = numbers
            if places.keep:
                places.uid, places.gid = uid, gid
            name = os.fsdecode(stream.read(name_length))
            link = os.fsdecode(stream.read(link_length))
            path = places.of(name)
            if kind == b"D":
                places.directory(path, stat.S_IMODE(permissions), seconds)
            elif kind == b"F":
                places.file(path, stat.S_IMODE(permissions), seconds, size, stream)
            elif kind == b"L":
                places.symbolic(path, link)
            else:
                places.hard(path, link)
    raise SystemExit("the files arrived incomplete")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        raise SystemExit(f"{error.filename or 'copying'}: {error.strerror}") from None
