"""Where a process maps a guest's memory file, and which of its pages have become private.

A private mapping shows the file's pages until the guest writes one: that page is then anonymous, and
`/proc/PID/pagemap` tells (the kernel's admin-guide/mm/pagemap: 8 bytes a page; bit 63 present, 62
swapped, 61 a page of a file, 55 soft-dirty). Linux 6.7 and newer are asked for the runs of such pages
(PAGEMAP_SCAN in linux/fs.h), which costs by what is there and not by the size of the memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentenv.errors import HostFault
from agentenv.vmm.transfer import PAGE, Addresses, Pages, pages_of

Bytes = npt.NDArray[np.uint8]
Booleans = npt.NDArray[np.bool_]

_LINE = re.compile(
    r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) \S+ (?P<offset>[0-9a-f]+)"
    r" (?P<major>[0-9a-f]+):(?P<minor>[0-9a-f]+) (?P<inode>\d+)"
)
_ENTRY = 8
_STEP = 1 << 17  # entries read at once: 1 MiB

# struct pm_scan_arg: size, flags, start, end, walk_end, vec, vec_len, max_pages, and the categories that
# are inverted, wanted all, wanted any, returned. It fills struct page_region: start, end, categories.
_SCAN = struct.Struct("=12Q")
_PAGEMAP_SCAN = 0xC0606610
_REGIONS = 4096
_IS_FILE, _IS_PRESENT, _IS_SWAPPED, _IS_SOFT_DIRTY = 1 << 2, 1 << 3, 1 << 4, 1 << 7
_CANNOT_SCAN = (errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP)

# Of an entry's highest byte.
_KNOWN, _PRESENT_OR_SWAPPED, _OF_FILE = 0xE0, 0x40, 0x20
# Of the one below.
_SOFT_DIRTY = 0x80


class Identity(NamedTuple):
    """What tells a file from every other one."""

    device: int
    inode: int


class Segment(NamedTuple):
    """A part of a file that is mapped in one piece; `first` and `pages` count in the file."""

    address: int
    first: int
    pages: int


@dataclass(frozen=True)
class Mapping:
    """A whole file as a process maps it: its pages from 0 to `pages`, in one or more segments."""

    pid: int
    segments: tuple[Segment, ...]

    @property
    def pages(self) -> int:
        return sum(segment.pages for segment in self.segments)

    def addresses(self, pages: Pages) -> Addresses:
        """The address of each page in the process."""
        firsts = np.array([segment.first for segment in self.segments])
        bases = np.array([s.address - s.first * PAGE for s in self.segments], np.int64).astype(np.uint64)
        which = np.searchsorted(firsts, pages, side="right") - 1
        return bases[which] + pages.astype(np.uint64) * np.uint64(PAGE)


def mapping_of(pid: int, file: Path) -> Mapping:
    """How process `pid` maps `file`, found by device and inode: the process may have opened it through
    a descriptor, and the file may have been renamed since.

    Raises:
        HostFault: the process is gone, or does not map the whole file.
    """
    try:
        status = file.stat()
        wanted = Identity(status.st_dev, status.st_ino)
        text = Path(f"/proc/{pid}/maps").read_text()
    except OSError as error:
        raise HostFault(f"the memory of process {pid} cannot be looked up: {error}") from error
    found = segments_in(text, wanted) or _looked_up(pid, text, wanted)
    # The last page of a mapping may reach beyond the file's end, never beyond its page.
    if not _whole(found, -(-status.st_size // PAGE)):
        raise HostFault(
            f"process {pid} does not map {file} whole: {sum(s.pages for s in found)} pages of "
            f"{status.st_size // PAGE}"
        )
    return Mapping(pid, found)


def segments_in(maps: str, wanted: Identity) -> tuple[Segment, ...]:
    """The segments of a file in the text of a `maps` file, in the file's order."""
    found = []
    for match in _LINE.finditer(maps):
        device = os.makedev(int(match["major"], 16), int(match["minor"], 16))
        if Identity(device, int(match["inode"])) == wanted:
            found.append(_segment(match))
    return tuple(sorted(found, key=lambda segment: segment.first))


def _looked_up(pid: int, maps: str, wanted: Identity) -> tuple[Segment, ...]:
    """The same where `maps` shows other numbers than stat does, as on btrfs and overlayfs."""
    found = []
    for match in _LINE.finditer(maps):
        if match["inode"] == "0":
            continue
        try:
            status = Path(f"/proc/{pid}/map_files/{match['start']}-{match['end']}").stat()
        except OSError:
            continue  # unmapped meanwhile, or not ours to see
        if Identity(status.st_dev, status.st_ino) == wanted:
            found.append(_segment(match))
    return tuple(sorted(found, key=lambda segment: segment.first))


def _segment(match: re.Match[str]) -> Segment:
    start, end, offset = (int(match[name], 16) for name in ("start", "end", "offset"))
    return Segment(start, offset // PAGE, (end - start) // PAGE)


def _whole(segments: tuple[Segment, ...], pages: int) -> bool:
    reached = 0
    for segment in segments:
        if segment.first != reached:
            return False
        reached += segment.pages
    return reached == pages and pages > 0


def private_pages(mapping: Mapping, *, soft_dirty: bool = False) -> Pages:
    """The pages of the file that the process has of its own, whether in memory or swapped out.

    With `soft_dirty` only those that were written since the soft-dirty bits were last cleared (see
    softdirty.py).

    Raises:
        HostFault: the process is gone or may not be looked into.
    """
    try:
        descriptor = os.open(f"/proc/{mapping.pid}/pagemap", os.O_RDONLY)
        try:
            parts = _scanned(descriptor, mapping, soft_dirty)
            if parts is None:
                parts = [part for each in mapping.segments for part in _read(descriptor, each, soft_dirty)]
        finally:
            os.close(descriptor)
    except OSError as error:
        raise HostFault(f"the page map of process {mapping.pid} cannot be read: {error}") from error
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def _scanned(descriptor: int, mapping: Mapping, soft_dirty: bool) -> list[Pages] | None:
    """The private pages as the kernel finds them; None where it cannot."""
    regions = np.empty((_REGIONS, 3), np.uint64)
    found = []
    for segment in mapping.segments:
        at, end = segment.address, segment.address + segment.pages * PAGE
        while at < end:
            try:
                count = _ask(descriptor, at, end, regions, soft_dirty)
            except OSError as error:
                if error.errno in _CANNOT_SCAN:
                    return None
                raise
            found.append(_pages_in(regions[:count], segment))
            # Where the kernel says that it stopped may be short of the last region that it found.
            at = int(regions[count - 1, 1]) if count == _REGIONS else end
    return found


def _ask(descriptor: int, start: int, end: int, regions: npt.NDArray[np.uint64], soft_dirty: bool) -> int:
    """How many regions were found; as many as there is room for where there may be more."""
    every = _IS_FILE | (_IS_SOFT_DIRTY if soft_dirty else 0)
    either = _IS_PRESENT | _IS_SWAPPED
    question = bytearray(
        _SCAN.pack(
            _SCAN.size, 0, start, end, 0, regions.ctypes.data, _REGIONS, 0, _IS_FILE, every, either, either
        )
    )
    return int(fcntl.ioctl(descriptor, _PAGEMAP_SCAN, question))


def _pages_in(regions: npt.NDArray[np.uint64], segment: Segment) -> Pages:
    bounds = (regions[:, :2].astype(np.int64) - segment.address) // PAGE + segment.first
    return pages_of(bounds[:, 0], bounds[:, 1] - bounds[:, 0])


def _read(descriptor: int, segment: Segment, soft_dirty: bool) -> list[Pages]:
    entries = np.empty((min(_STEP, segment.pages), _ENTRY), np.uint8)
    found = []
    for at in range(0, segment.pages, _STEP):
        wanted = entries[: min(_STEP, segment.pages - at)]
        position = (segment.address // PAGE + at) * _ENTRY
        if os.preadv(descriptor, [wanted.data], position) != wanted.nbytes:
            raise HostFault("a process ended while its page map was read")
        chosen = _is_private(wanted, soft_dirty)
        found.append((np.flatnonzero(chosen) + (segment.first + at)).astype(np.uint32))
    return found


def _is_private(entries: Bytes, soft_dirty: bool) -> Booleans:
    highest = entries[:, 7] & _KNOWN
    chosen: Booleans = (highest >= _PRESENT_OR_SWAPPED) & ((highest & _OF_FILE) == 0)
    if soft_dirty:
        chosen &= (entries[:, 6] & _SOFT_DIRTY) != 0
    return chosen
