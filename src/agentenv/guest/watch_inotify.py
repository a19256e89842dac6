"""Linux's inotify, as far as watching directories needs it: see inotify(7).

Python has no binding for it in the standard library, so the C library is called through ctypes,
which is imported with the first watch.
"""

from __future__ import annotations

import errno
import os
from sys import byteorder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MODIFY = 0x2
ATTRIB = 0x4
MOVED_FROM = 0x40
MOVED_TO = 0x80
CREATE = 0x100
DELETE = 0x200
DELETE_SELF = 0x400
MOVE_SELF = 0x800
UNMOUNT = 0x2000
OVERFLOW = 0x4000
IGNORED = 0x8000
IS_DIRECTORY = 0x40000000

_ONLY_DIRECTORY = 0x01000000
_DO_NOT_FOLLOW = 0x02000000
_INTERESTING = MODIFY | ATTRIB | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF

# struct inotify_event: int wd; uint32_t mask, cookie, len; char name[len].
_HEAD = 16
_READ_SIZE = 64 * 1024

# Of linux/magic.h: filesystems whose files change without this kernel's doing.
_NETWORK_FILESYSTEMS = frozenset(
    (
        0x6969,  # NFS
        0xFF534D42,  # CIFS
        0x517B,  # SMB
        0xFE534D42,  # SMB2
        0x65735546,  # FUSE
    )
)

_libc: Any = None


class Event:
    """One thing that happened to a watched directory (no name) or to something in it."""

    __slots__ = ("cookie", "mask", "name", "watch")

    def __init__(self, watch: int, mask: int, cookie: int, name: str) -> None:
        self.watch = watch
        self.mask = mask
        self.cookie = cookie
        self.name = name


def decode(data: bytes) -> list[Event]:
    """The events of one read, in order."""
    events: list[Event] = []
    at = 0
    while at + _HEAD <= len(data):
        watch, mask, cookie, length = _numbers(data, at)
        name = data[at + _HEAD : at + _HEAD + length].rstrip(b"\0")
        events.append(Event(watch, mask, cookie, os.fsdecode(name)))
        at += _HEAD + length
    return events


def _numbers(data: bytes, at: int) -> tuple[int, int, int, int]:
    from_bytes = int.from_bytes
    return (
        from_bytes(data[at : at + 4], byteorder, signed=True),
        from_bytes(data[at + 4 : at + 8], byteorder),
        from_bytes(data[at + 8 : at + 12], byteorder),
        from_bytes(data[at + 12 : at + 16], byteorder),
    )


class Inotify:
    """One inotify instance; `fd` is non-blocking and readable when there are events."""

    def __init__(self) -> None:
        """Raises OSError: EMFILE when the user's limit of instances is reached."""
        self.fd: int = _checked(_library().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify")

    def add(self, path: str, *, follow: bool = False) -> int:
        """Watch the directory at `path`; the number that its events carry.

        Raises:
            OSError: it is gone or no directory, or ENOSPC when the limit of watches is reached.
        """
        mask = _INTERESTING | _ONLY_DIRECTORY | (0 if follow else _DO_NOT_FOLLOW)
        return _checked(_library().inotify_add_watch(self.fd, os.fsencode(path), mask), path)

    def remove(self, watch: int) -> None:
        """Stop a watch; nothing if the kernel already did."""
        _library().inotify_rm_watch(self.fd, watch)

    def read(self) -> list[Event]:
        """What has happened since the last read; [] when nothing has."""
        try:
            return decode(os.read(self.fd, _READ_SIZE))
        except BlockingIOError:
            return []

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def on_network_filesystem(path: str) -> bool:
    """Whether `path` is on NFS, CIFS, SMB or FUSE, where inotify sees only this guest's own changes.

    Raises:
        OSError: `path` cannot be reached.
    """
    import ctypes

    # struct statfs begins with its type, a word; 256 bytes hold the rest on every architecture.
    buffer = ctypes.create_string_buffer(256)
    _checked(_library().statfs(os.fsencode(path), buffer), path)
    kind = int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], byteorder)
    return kind & 0xFFFFFFFF in _NETWORK_FILESYSTEMS


def _library() -> Any:
    global _libc
    if _libc is None:
        import ctypes

        _libc = ctypes.CDLL(None, use_errno=True)
    return _libc


def _checked(result: int, what: str) -> int:
    if result < 0:
        import ctypes

        number = ctypes.get_errno()
        raise OSError(number, _explain(number), what)
    return result


def _explain(number: int) -> str:
    if number == errno.EMFILE:
        return "too many watchers: the limit fs.inotify.max_user_instances is reached"
    if number == errno.ENOSPC:
        return "too many directories watched: the limit fs.inotify.max_user_watches is reached"
    return os.strerror(number)
