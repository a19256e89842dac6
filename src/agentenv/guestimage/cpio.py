"""Writing a cpio archive in the `newc` form, which is what Linux unpacks as an initramfs.

The form is described in the kernel's Documentation/driver-api/early-userspace/buffer-format.rst.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass

_ALIGN = 4
_PAGE = 4096


@dataclass(frozen=True)
class Entry:
    """One file of an archive; all belong to root and carry no time, so archives are reproducible."""

    path: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def directory(path: str) -> Entry:
    """A directory, mode 0755."""
    return Entry(path, stat.S_IFDIR | 0o755)


def file(path: str, data: bytes, mode: int = 0o644) -> Entry:
    """A regular file."""
    return Entry(path, stat.S_IFREG | mode, data)


def link(path: str, target: str) -> Entry:
    """A symbolic link."""
    return Entry(path, stat.S_IFLNK | 0o777, target.encode())


def character_device(path: str, major: int, minor: int) -> Entry:
    """A character device, mode 0600."""
    return Entry(path, stat.S_IFCHR | 0o600, device=(major, minor))


def archive(entries: Iterable[Entry]) -> bytes:
    """The archive's bytes, clear of tables; a directory must come before what is in it."""
    parts = [_record(number, entry) for number, entry in enumerate(entries, start=1)]
    parts.append(_record(0, Entry("TRAILER!!!", 0)))
    return clear_of_tables(b"".join(parts))


def clear_of_tables(archive: bytes) -> bytes:
    """The archive with zeros after it, so that all but the first byte of its last page is free.

    QEMU puts an initramfs at the last page boundary that leaves room for it below the top of memory,
    and the firmware of microvm machines puts its ACPI tables, one or two KiB, at the very top. With a
    kernel that starts directly the first overwrites the second, and the guest finds no devices.
    """
    return archive + bytes((1 - len(archive)) % _PAGE)


def _record(number: int, entry: Entry) -> bytes:
    name = entry.path.lstrip("/").encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    major, minor = entry.device
    fields = (number, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, major, minor, len(name), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    return _padded(header + name) + _padded(entry.data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % _ALIGN)
