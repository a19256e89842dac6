"""A delta of a guest's memory: the pages that a capture found changed, in two files.

`memory` holds the pages one after the other, so that writing it is a few large writes however
scattered the pages are, and its length tells whether it is whole. `memory.map` says which pages they
are, in the order of the file, little-endian:

    8 bytes   "AENVMAP" and a zero byte
    u16       version, 1
    u16       0
    u32       bytes of a page
    u64       pages of the guest's whole memory
    u64       pages held
    u64       number of runs
    32 bytes  SHA-256 of the runs, preceded by the header above
    runs      u32 first page, u32 number of pages; in any order, none of them twice

The map is written last: a delta without one was never finished.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agentenv.errors import StoreCorrupt
from agentenv.vmm.stored import map_of, unreadable
from agentenv.vmm.transfer import PAGE, Pages, pages_of

VERSION = 1

_MAGIC = b"AENVMAP\0"
_HEADER = struct.Struct("<8sHHIQQQ")
_DIGEST = 32
_RUN = 8


def encode_map(pages: Pages, total: int) -> bytes:
    """The map file of a delta that holds `pages` of a memory of `total` pages."""
    runs = _runs_of(pages)
    header = _HEADER.pack(_MAGIC, VERSION, 0, PAGE, total, len(pages), len(runs))
    payload = runs.astype("<u4").tobytes()
    return header + hashlib.sha256(header + payload).digest() + payload


def decode_map(data: bytes) -> tuple[Pages, int]:
    """The pages that a delta holds, and how many the whole memory has.

    Raises:
        ValueError: this is no such map, or it is damaged; says in which way.
    """
    start = _HEADER.size + _DIGEST
    if len(data) < start or not data.startswith(_MAGIC):
        raise ValueError("it is no map of memory pages")
    _, version, _, page, total, held, count = _HEADER.unpack_from(data)
    if version != VERSION or page != PAGE:
        raise ValueError(f"it has version {version} and pages of {page} bytes, not {VERSION} and {PAGE}")
    digest, payload = data[_HEADER.size : start], data[start:]
    if len(payload) != count * _RUN:
        raise ValueError(f"it has {len(payload)} bytes of runs, not {count * _RUN}")
    if hashlib.sha256(data[: _HEADER.size] + payload).digest() != digest:
        raise ValueError("its digest is not that of its content")
    runs = np.frombuffer(payload, "<u4").reshape(-1, 2).astype(np.int64)
    if not _consistent(runs, held, total):
        raise ValueError("its runs contradict each other or its header")
    return pages_of(runs[:, 0], runs[:, 1]), total


def _runs_of(pages: Pages) -> npt.NDArray[np.int64]:
    wide = pages.astype(np.int64)
    starts = np.flatnonzero(np.diff(wide, prepend=-2) != 1)
    return np.stack((wide[starts], np.diff(np.append(starts, len(wide)))), axis=1)


def _consistent(runs: npt.NDArray[np.int64], held: int, total: int) -> bool:
    runs = runs[np.argsort(runs[:, 0])]
    firsts, counts = runs[:, 0], runs[:, 1]
    ends = firsts + counts
    return bool(
        counts.sum() == held
        and (counts > 0).all()
        and (firsts[1:] >= ends[:-1]).all()
        and (not len(runs) or ends[-1] <= total)
    )


class Source:
    """A file of pages, open and mapped for reading. The mapping is only ever read through
    `transfer`: touching it could end the process where the file is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        self._mapping: mmap.mmap | None = None
        self.address = 0
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self.descriptor).st_size
            if self.size:
                self._mapping = mmap.mmap(self.descriptor, self.size, mmap.MAP_SHARED, mmap.PROT_READ)
                self.address = np.frombuffer(self._mapping, np.uint8).ctypes.data
        except OSError as error:
            self.close()
            raise unreadable(path, error) from error

    def close(self) -> None:
        """Let the file go; repeatable."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Delta(Source):
    """An open delta, checked by its map and length.

    Raises:
        StoreCorrupt: a file is missing, damaged or cut short.
    """

    def __init__(self, path: Path) -> None:
        self.pages, self.total = read_map(path)
        super().__init__(path)
        if self.size != len(self.pages) * PAGE:
            self.close()
            raise StoreCorrupt(
                f"the memory layer {path} has {self.size} bytes, not the {len(self.pages) * PAGE} of its map"
            )


def read_map(memory: Path) -> tuple[Pages, int]:
    """The pages of a delta, and of the whole memory.

    Raises:
        StoreCorrupt: the map is missing or damaged.
    """
    path = map_of(memory)
    try:
        return decode_map(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise StoreCorrupt(f"the memory map {path} cannot be used: {error}") from None
