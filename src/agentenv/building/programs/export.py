"""Runs in the guest: writes the root filesystem to standard output as a tar archive (pax), an image's layer.

    export.py RESOLV_CONF

Of a place where something is mounted that is taken which the disk has there. Owners, modes, times, hard
links, devices, extended attributes and holes are kept. Left out is what this guest put there for itself: our
own directories, the content of resolv.conf where it is RESOLV_CONF, and a line of our own in hosts.

Formats: pax(1p); for files with holes GNU tar's "PAX Format, Version 1.0"; for attributes SCHILY.xattr.
"""

from __future__ import annotations

import io
import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

_BUSYBOX = "/.agentenv/bin/busybox"
_VIEW = "/run/agentenv-root"
_BLOCK = 512
_CHUNK = 256 * 1024
_NAME_BYTES = 100
_OCTAL_IDS = 0o7777777
_OCTAL_SIZE = 0o77777777777
_OWN = ".agentenv"
_LEFT_OUT = frozenset(("lost+found",))
_HOSTS_MARK = b"# agentenv"
_TYPES = {stat.S_IFDIR: b"5", stat.S_IFLNK: b"2", stat.S_IFCHR: b"3", stat.S_IFBLK: b"4", stat.S_IFIFO: b"6"}

Records = dict[bytes, bytes]


def pax(records: Records) -> bytes:
    """The body of an extended header; each record begins with its own length."""
    body = b""
    for key, value in records.items():
        rest = b" " + key + b"=" + value + b"\n"
        length = len(rest)
        while length != len(str(length)) + len(rest):
            length = len(str(length)) + len(rest)
        body += str(length).encode() + rest
    return body


def padding(size: int) -> bytes:
    """What fills the last block."""
    return bytes(-size % _BLOCK)


def field(number: int, width: int, most: int) -> bytes:
    """A number of a header; one that does not fit is in the extended header."""
    return b"%0*o\0" % (width - 1, number if number <= most else 0)


def header(name: bytes, kind: bytes, status: os.stat_result, size: int, link: bytes = b"") -> bytes:
    """A header block (ustar)."""
    device = status.st_rdev if kind in (b"3", b"4") else 0
    parts = (
        name[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"),
        field(stat.S_IMODE(status.st_mode), 8, _OCTAL_IDS),
        field(status.st_uid, 8, _OCTAL_IDS),
        field(status.st_gid, 8, _OCTAL_IDS),
        field(size, 12, _OCTAL_SIZE),
        field(max(0, int(status.st_mtime)), 12, _OCTAL_SIZE),
        b" " * 8,
        kind,
        link[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"),
        b"ustar\00000",
        bytes(64),
        field(os.major(device), 8, _OCTAL_IDS),
        field(os.minor(device), 8, _OCTAL_IDS),
        bytes(167),
    )
    block = b"".join(parts)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def attributes(path: str) -> Records:
    """The extended attributes of an entry."""
    records: Records = {}
    for name in os.listxattr(path, follow_symlinks=False):
        value = os.getxattr(path, name, follow_symlinks=False)
        records[b"SCHILY.xattr." + os.fsencode(name)] = value
    return records


def extents(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Where a file has data: offsets and lengths."""
    found = []
    at = 0
    while at < size:
        try:
            start = os.lseek(file.fileno(), at, os.SEEK_DATA)
        except OSError:  # there is only a hole left
            break
        at = min(os.lseek(file.fileno(), start, os.SEEK_HOLE), size)
        found.append((start, at - start))
    return found


class Archive:
    """The archive that is written; paths are relative to the directory that this process is in."""

    def __init__(self, out: BinaryIO, resolv_conf: bytes) -> None:
        self._out = out
        self._resolv_conf = resolv_conf
        self._linked: dict[tuple[int, int], bytes] = {}

    def tree(self, directory: str) -> None:
        """A directory and all below it."""
        self._entry(directory, b"5", os.lstat(directory))
        for name in sorted(os.listdir(directory)):
            path = name if directory == "." else f"{directory}/{name}"
            if directory == "." and (name in _LEFT_OUT or name.startswith(_OWN)):
                continue
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                self.tree(path)
            elif not stat.S_ISSOCK(status.st_mode):  # which ends with who made it
                self._other(path, status)

    def finish(self) -> None:
        """The end of an archive."""
        self._out.write(bytes(2 * _BLOCK))
        self._out.flush()

    def _other(self, path: str, status: os.stat_result) -> None:
        if status.st_nlink > 1:
            known = self._linked.setdefault((status.st_dev, status.st_ino), os.fsencode(path))
            if known != os.fsencode(path):
                self._entry(path, b"1", status, link=known)
                return
        if stat.S_ISREG(status.st_mode):
            self._file(path, status)
        else:
            link = os.fsencode(os.readlink(path)) if stat.S_ISLNK(status.st_mode) else b""
            self._entry(path, _TYPES[stat.S_IFMT(status.st_mode)], status, link=link)

    def _file(self, path: str, status: os.stat_result) -> None:
        if path in ("etc/resolv.conf", "etc/hosts"):
            self._without_ours(path, status)
            return
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = [(0, size)]
            if status.st_blocks * _BLOCK < size:
                data = extents(file, size)
            if data == [(0, size)] or not size:
                self._entry(path, b"0", status, size=size)
            else:
                self._sparse(path, status, size, data)
            for start, length in data:
                self._copy(file, path, start, length)
            self._out.write(padding(sum(length for _, length in data)))

    def _sparse(self, path: str, status: os.stat_result, size: int, data: list[tuple[int, int]]) -> None:
        numbers = [len(data) + 1, *(number for extent in data for number in extent), size, 0]
        table = b"".join(b"%d\n" % number for number in numbers)
        table += padding(len(table))
        name = os.fsencode(path)
        records = {b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0", b"GNU.sparse.name": name}
        records[b"GNU.sparse.realsize"] = b"%d" % size
        stored = len(table) + sum(length for _, length in data)
        self._entry(path, b"0", status, size=stored, more=records, shown=b"GNUSparseFile.0/" + name)
        self._out.write(table)

    def _without_ours(self, path: str, status: os.stat_result) -> None:
        with open(path, "rb") as file:
            content = file.read()
        if path == "etc/resolv.conf" and content == self._resolv_conf:
            content = b""
        elif path == "etc/hosts":
            lines = content.splitlines(keepends=True)
            content = b"".join(line for line in lines if not line.rstrip().endswith(_HOSTS_MARK))
        self._entry(path, b"0", status, size=len(content))
        self._out.write(content + padding(len(content)))

    def _copy(self, file: BinaryIO, path: str, start: int, left: int) -> None:
        file.seek(start)
        while left:
            data = file.read(min(left, _CHUNK))
            if not data:  # it became shorter while it was read, as a log may
                data = bytes(min(left, _CHUNK))
            self._out.write(data)
            left -= len(data)

    def _entry(
        self,
        path: str,
        kind: bytes,
        status: os.stat_result,
        *,
        size: int = 0,
        link: bytes = b"",
        more: Records | None = None,
        shown: bytes | None = None,
    ) -> None:
        name = shown or os.fsencode(path) + (b"/" if kind == b"5" else b"")
        records = {} if kind == b"1" else attributes(path)
        records.update(more or {})
        if shown is None and (len(name) > _NAME_BYTES or not name.isascii()):
            records[b"path"] = name
        if len(link) > _NAME_BYTES or not link.isascii():
            records[b"linkpath"] = link
        for key, number, most in (
            (b"uid", status.st_uid, _OCTAL_IDS),
            (b"gid", status.st_gid, _OCTAL_IDS),
            (b"size", size, _OCTAL_SIZE),
        ):
            if number > most:
                records[key] = b"%d" % number
        seconds, rest = divmod(status.st_mtime_ns, 10**9)
        if rest or seconds < 0:
            records[b"mtime"] = b"%d.%09d" % (seconds, rest) if seconds >= 0 else b"%d" % seconds
        if records:
            body = pax(records)
            self._out.write(header(b"pax", b"x", status, len(body)) + body + padding(len(body)))
        self._out.write(header(name, kind, status, size, link))


def main(resolv_conf: str) -> None:
    """Does it."""
    os.makedirs(_VIEW, exist_ok=True)
    if os.spawnv(os.P_WAIT, _BUSYBOX, ["mount", "-o", "bind", "/", _VIEW]):
        raise SystemExit("the root filesystem cannot be seen without what is mounted in it")
    os.chdir(_VIEW)
    out = io.BufferedWriter(io.FileIO(1, "w", closefd=False), _CHUNK)
    archive = Archive(out, resolv_conf.encode())
    archive.tree(".")
    archive.finish()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OSError as error:
        raise SystemExit(f"{error.filename or 'the archive'}: {error.strerror}") from None
