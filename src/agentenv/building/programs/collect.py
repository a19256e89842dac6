"""Runs in the guest: packs what a COPY takes from this file system into the stream that `place` reads.

    collect.py SOURCE STREAM

SOURCE is an absolute path, or a pattern as of Go's `filepath.Match`. Of a directory its content is taken,
of several matches all.
"""

from __future__ import annotations

import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

_CHUNK = 256 * 1024
_MAGIC = frozenset("*?[\\")
_LEFT_OUT = frozenset(("/proc", "/sys", "/dev", "/run", "/.agentenv", "/lost+found"))


def matches(name: str, pattern: str) -> bool:
    """Whether a name without slashes matches."""
    if not pattern:
        return not name
    head, rest = pattern[0], pattern[1:]
    if head == "*":
        return any(matches(name[skip:], rest) for skip in range(len(name) + 1))
    if not name:
        return False
    if head == "?":
        return matches(name[1:], rest)
    if head == "[" and "]" in rest[1:]:
        end = rest.index("]", 1)
        return in_set(name[0], rest[:end]) and matches(name[1:], rest[end + 1 :])
    if head == "\\" and rest:
        head, rest = rest[0], rest[1:]
    return name[0] == head and matches(name[1:], rest)


def in_set(letter: str, letters: str) -> bool:
    """Whether a letter is one of a set's, `a-c^` and so on."""
    negated = letters[:1] == "^"
    found, place = False, 1 if negated else 0
    while place < len(letters):
        first = last = letters[place]
        if letters[place + 1 : place + 2] == "-" and place + 2 < len(letters):
            last, place = letters[place + 2], place + 2
        found = found or first <= letter <= last
        place += 1
    return found != negated


def found_by(source: str) -> list[str]:
    """The paths that a source means, in their order."""
    paths = ["/"]
    for part in source.split("/"):
        if not part:
            continue
        if not _MAGIC & set(part):
            paths = [os.path.join(path, part) for path in paths]
            continue
        names = [(path, name) for path in paths if os.path.isdir(path) for name in sorted(os.listdir(path))]
        paths = [os.path.join(path, name) for path, name in names if matches(name, part)]
    return [path for path in paths if os.path.lexists(path)]


class Collection:
    """The stream that is written."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._linked: dict[tuple[int, int], str] = {}

    def begin(self, single: str) -> None:
        """`single` is the name of the one thing that is packed, if it is one and no directory."""
        self._out.write(os.fsencode(single).replace(b"\n", b"\1") + b"\n")

    def content(self, directory: str, prefix: str) -> None:
        """All that is below a directory."""
        for name in sorted(os.listdir(directory)):
            self.add(os.path.join(directory, name), f"{prefix}{name}")

    def add(self, path: str, name: str) -> None:
        """One thing, with all below it."""
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            if path in _LEFT_OUT:
                return
            self._head(b"D", status, name)
            self.content(path, f"{name}/")
        elif stat.S_ISLNK(status.st_mode):
            self._head(b"L", status, name, os.readlink(path))
        elif stat.S_ISREG(status.st_mode):
            self._file(path, name, status)

    def _file(self, path: str, name: str, status: os.stat_result) -> None:
        if status.st_nlink > 1:
            known = self._linked.setdefault((status.st_dev, status.st_ino), name)
            if known != name:
                self._head(b"H", status, name, known)
                return
        with open(path, "rb") as file:
            left = status.st_size
            self._head(b"F", status, name, size=left)
            while left:
                data = file.read(min(left, _CHUNK))
                if not data:
                    raise SystemExit(f"{path} became shorter while it was read")
                self._out.write(data)
                left -= len(data)

    def _head(self, kind: bytes, status: os.stat_result, name: str, link: str = "", size: int = 0) -> None:
        encoded, target = os.fsencode(name), os.fsencode(link)
        facts = (stat.S_IMODE(status.st_mode), max(0, int(status.st_mtime)), status.st_uid, status.st_gid)
        numbers = (*facts, len(encoded), len(target), size)
        self._out.write(
            kind + b" " + b" ".join(b"%d" % number for number in numbers) + b"\n" + encoded + target
        )

    def finish(self) -> None:
        """The end of the stream."""
        self._out.write(b".\n")


def main(source: str, stream: str) -> None:
    """Does it; SystemExit says what is wrong."""
    paths = found_by(source)
    if not paths:
        raise SystemExit(f"source path does not exist: {source}")
    with open(stream, "wb") as out:
        collection = Collection(out)
        if len(paths) == 1 and not os.path.isdir(paths[0]):
            collection.begin(os.path.basename(paths[0]))
            collection.add(os.path.realpath(paths[0]) if os.path.exists(paths[0]) else paths[0], "")
        else:
            collection.begin("")
            for path in paths:
                if os.path.isdir(path):
                    collection.content(path, "")
                else:
                    collection.add(path, os.path.basename(path))
        collection.finish()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3])
    except OSError as error:
        raise SystemExit(f"{error.filename or sys.argv[1]}: {error.strerror}") from None
