"""What is told of a file: E2B's `EntryInfo`, in the JSON form of its protocol.

Shapes follow protobuf's JSON mapping: 64-bit numbers as text, times as RFC 3339 with nanoseconds,
empty fields left out.
"""

from __future__ import annotations

import os
import stat
import time

from agentenv.guest import users
from agentenv.guest.files_metadata import read_metadata
from agentenv.guest.paths import base_name, printable

FILE = "FILE_TYPE_FILE"
DIRECTORY = "FILE_TYPE_DIRECTORY"
SYMLINK = "FILE_TYPE_SYMLINK"

# Kinds as Go's fs.FileMode.String writes them, which is what E2B's clients show.
_KINDS = {
    stat.S_IFREG: "",
    stat.S_IFDIR: "d",
    stat.S_IFLNK: "L",
    stat.S_IFBLK: "D",
    stat.S_IFIFO: "p",
    stat.S_IFSOCK: "S",
}
_BITS = "rwxrwxrwx"

# What protobuf's Timestamp can hold: years 1 to 9999.
_EARLIEST = -62135596800
_LATEST = 253402300799


def permissions(mode: int) -> str:
    """`mode` as Go writes it: "-rw-r--r--", "drwxr-xr-x", "Lrwxrwxrwx", "dtrwxrwxrwx", "urwxr-xr-x"."""
    kind = stat.S_IFMT(mode)
    letters = "D" if kind == stat.S_IFCHR else _KINDS.get(kind, "?")
    if mode & stat.S_ISUID:
        letters += "u"
    if mode & stat.S_ISGID:
        letters += "g"
    if kind == stat.S_IFCHR:
        letters += "c"
    if mode & stat.S_ISVTX:
        letters += "t"
    bits = "".join(letter if mode & (0o400 >> at) else "-" for at, letter in enumerate(_BITS))
    return (letters or "-") + bits


def timestamp(nanoseconds: int) -> str:
    """Unix time in nanoseconds as RFC 3339 in UTC, held within the years 1 to 9999."""
    seconds, fraction = divmod(nanoseconds, 1_000_000_000)
    if seconds > _LATEST:
        seconds, fraction = _LATEST, 999_999_999
    elif seconds < _EARLIEST:
        seconds, fraction = _EARLIEST, 0
    year, month, day, hour, minute, second = time.gmtime(seconds)[:6]
    return f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{fraction:09}Z"


def entry(path: str, shown: str | None = None) -> dict[str, object]:
    """The `EntryInfo` of `path`.

    A link is told by its target's type and mode, with `symlinkTarget` the resolved path, as E2B
    does; one that leads nowhere is FILE_TYPE_SYMLINK.

    Args:
        path: where to look; a link at its end is not followed.
        shown: the path to report; `path` when None.

    Raises:
        OSError: there is nothing, or it cannot be reached.
    """
    found = os.lstat(path)
    shown = path if shown is None else shown
    told: dict[str, object] = {
        "name": printable(base_name(shown)),
        "path": printable(shown),
        "size": str(found.st_size),
        "permissions": permissions(found.st_mode),
        "owner": users.by_uid(found.st_uid),
        "group": users.by_gid(found.st_gid),
        "modifiedTime": timestamp(found.st_mtime_ns),
    }
    if stat.S_ISLNK(found.st_mode):
        _tell_target(path, told)
    else:
        told["mode"] = stat.S_IMODE(found.st_mode) & 0o777
        _tell_type(found.st_mode, told)
    metadata = read_metadata(path)
    if metadata:
        told["metadata"] = metadata
    return told


def _tell_target(path: str, told: dict[str, object]) -> None:
    try:
        target = os.path.realpath(path, strict=True)
        found = os.stat(target)
    except OSError:
        told["symlinkTarget"] = printable(path)
        told["type"] = SYMLINK
        return
    told["symlinkTarget"] = printable(target)
    told["mode"] = stat.S_IMODE(found.st_mode) & 0o777
    _tell_type(found.st_mode, told)


def _tell_type(mode: int, told: dict[str, object]) -> None:
    if stat.S_ISREG(mode):
        told["type"] = FILE
    elif stat.S_ISDIR(mode):
        told["type"] = DIRECTORY
