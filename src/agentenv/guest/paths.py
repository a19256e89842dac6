"""Paths as clients give them: home and relative forms, and what cannot be a path at all."""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Homed(Protocol):
        """What a path is relative to: a user of the image."""

        @property
        def home(self) -> str: ...


# The kernel's PATH_MAX counts the terminating NUL: linux/limits.h.
_LONGEST = 4095

DIRECTORY_MODE = 0o755


class PathError(ValueError):
    """The text cannot name a file; the message is fit for the client."""


def expand(path: str, user: Homed, workdir: str | None = None) -> str:
    """The absolute path that a client means.

    Args:
        path: absolute, relative to the user's home, `~`, `~/below`, or "" for the default directory.
        user: whose home it is.
        workdir: the sandbox's default directory, for "" only; the home when None.

    Raises:
        PathError: another user's home (`~name`), a NUL, text that no file name can hold, or more
            than the kernel's limit of 4095 bytes.
    """
    path = path or workdir or user.home
    if path.startswith("~"):
        if path[1:2] not in ("", "/", "\\"):
            raise PathError(f"failed to expand path '{path}': cannot expand user-specific home dir")
        path = user.home + "/" + path[1:]
        path = os.path.normpath(path)
    elif not path.startswith("/"):
        path = os.path.normpath(os.path.join(user.home or "/", path))
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        raise PathError("invalid path: it holds characters that no file name can hold") from None
    if b"\0" in encoded:
        raise PathError("invalid path: it holds a NUL character")
    if len(encoded) > _LONGEST:
        raise PathError(f"invalid path: {len(encoded)} bytes are more than the limit of {_LONGEST}")
    return path


def base_name(path: str) -> str:
    """The last component; "/" for the root, whatever slashes trail."""
    return os.path.basename(path.rstrip("/")) or "/"


def parent(path: str) -> str:
    """The directory that holds `path`'s last component."""
    return os.path.dirname(path.rstrip("/")) or "/"


def printable(path: str) -> str:
    """`path` as text that every JSON reader accepts: bytes that are not UTF-8 become U+FFFD."""
    if path.isascii():
        return path
    return os.fsencode(path).decode("utf-8", "replace")


def make_directories(path: str, uid: int, gid: int) -> bool:
    """Make `path` and what is missing above it, each new directory 0755 and owned by `uid`, `gid`.

    Returns whether there was anything to make.

    Raises:
        NotADirectoryError: the path, or something above it, is a file.
        OSError: what the kernel says.
    """
    missing: list[str] = []
    current = os.path.normpath(path)
    while True:
        try:
            found = os.stat(current)
        except FileNotFoundError:
            missing.append(current)
            current = os.path.dirname(current)
            continue
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(20, "path is a file", current)
        break
    for directory in reversed(missing):
        try:
            os.mkdir(directory, DIRECTORY_MODE)
        except FileExistsError:
            pass  # someone else was faster, perhaps not yet done with its owner
        # Not through a link: the directory above may be the user's, who could swap one in.
        os.chown(directory, uid, gid, follow_symlinks=False)
    return bool(missing)
