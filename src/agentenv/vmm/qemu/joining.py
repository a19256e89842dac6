"""One disk layer made of several that lie upon each other, as if all had been written to it.

Of each cluster the topmost layer that has it counts, be it with data or as one that reads as zeros: both
hide what lies below the lot, and what none of them has shows through as before. The format is that of
`overlay`; a layer of any other form is refused rather than guessed at.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agentenv.errors import StoreCorrupt
from agentenv.vmm.memory import copy_range
from agentenv.vmm.qemu.overlay import CLUSTER, CLUSTER_BITS, HEADER, MAGIC, PER_TABLE, header
from agentenv.vmm.stored import new_files, unreadable

Entries = npt.NDArray[np.uint64]

# Of a second-level entry (docs/interop/qcow2.rst, "L2 table entry").
_COPIED = np.uint64(1 << 63)  # the cluster is used once, so it may be written in place
_COMPRESSED = np.uint64(1 << 62)
_ZEROS = np.uint64(1)
_OFFSET = np.uint64(0x00FF_FFFF_FFFF_FE00)

_COUNTS_PER_BLOCK = CLUSTER // 2


@dataclass(frozen=True)
class _Part:
    """What one second-level table will say: for each of its clusters the entry that counts, and in which
    of the layers it is."""

    index: int
    entries: Entries
    owners: npt.NDArray[np.uint16]

    @property
    def data(self) -> npt.NDArray[np.intp]:
        """Which of the clusters have data."""
        return np.flatnonzero(((self.entries & _OFFSET) != 0) & ((self.entries & _ZEROS) == 0))


@dataclass(frozen=True)
class _Layout:
    """Where everything is in the new file, in clusters; data comes last."""

    reference_tables: int
    reference_blocks: int
    first_level: int
    second_level: int
    data: int

    @classmethod
    def of(cls, tables: int, parts: int, data: int) -> _Layout:
        first_level = -(-tables // PER_TABLE)
        blocks = rows = 1
        while True:  # reference counts are counted too
            total = 1 + rows + blocks + first_level + parts + data
            needed = -(-total // _COUNTS_PER_BLOCK)
            if needed <= blocks and -(-blocks // PER_TABLE) <= rows:
                return cls(rows, blocks, first_level, parts, data)
            blocks = max(blocks, needed)
            rows = -(-blocks // PER_TABLE)

    @property
    def first_level_at(self) -> int:
        return 1 + self.reference_tables + self.reference_blocks

    @property
    def second_level_at(self) -> int:
        return self.first_level_at + self.first_level

    @property
    def data_at(self) -> int:
        return self.second_level_at + self.second_level

    @property
    def total(self) -> int:
        return self.data_at + self.data


class _Source:
    """An open layer: `size` is the disk's, `length` the file's."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, self.descriptor)
            self.length = os.fstat(self.descriptor).st_size
            start = os.pread(self.descriptor, HEADER.size, 0)
        except OSError as error:
            raise unreadable(path, error) from error
        if len(start) < HEADER.size or start[:4] != MAGIC:
            raise StoreCorrupt(f"the disk layer {path} is not a qcow2 file")
        _, version, backing, _, bits, self.size, crypt, tables, first_level, *rest = HEADER.unpack(start)
        snapshots, features = rest[2], rest[4]
        if version != 3 or bits != CLUSTER_BITS or backing or crypt or snapshots or features:
            raise StoreCorrupt(f"the disk layer {path} has a form that no machine of this node writes")
        self._first = self._table(first_level, tables) & _OFFSET

    @property
    def tables(self) -> int:
        """Second-level tables that its disk can have."""
        return len(self._first)

    def entries(self, index: int) -> Entries | None:
        """A second-level table; None where the layer has nothing in its range."""
        if index >= len(self._first) or not self._first[index]:
            return None
        found = self._table(int(self._first[index]), PER_TABLE)
        if (found & _COMPRESSED).any():
            raise StoreCorrupt(
                f"the disk layer {self.path} is compressed, which no machine of this node does"
            )
        return found

    def _table(self, at: int, entries: int) -> Entries:
        try:
            content = os.pread(self.descriptor, entries * 8, at)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if len(content) != entries * 8:
            raise StoreCorrupt(f"the disk layer {self.path} was cut short: a table is missing")
        return np.frombuffer(content, ">u8").astype(np.uint64)


def join(layers: Sequence[Path], into: Path) -> None:
    """Write the file `into`, the one layer in the place of `layers` (bottom up). Blocking.

    Raises:
        StoreCorrupt: a layer is missing, damaged or of another form. StoreFull, StoreFault: it cannot be
            written; nothing of it is left.
    """
    with ExitStack() as stack:
        sources = [_Source(path, stack) for path in layers]
        top = sources[-1]
        if any(source.size > top.size for source in sources):
            raise StoreCorrupt(f"the disk layer {top.path} is smaller than one below")
        parts = [part for index in range(top.tables) if (part := _part(sources, index)) is not None]
        layout = _Layout.of(top.tables, len(parts), sum(len(part.data) for part in parts))
        make = stack.enter_context(new_files())
        descriptor = make(into)
        os.ftruncate(descriptor, layout.total * CLUSTER)
        _write_tables(descriptor, top, parts, layout)
        _write_data(descriptor, sources, parts, layout)


def _part(sources: Sequence[_Source], index: int) -> _Part | None:
    entries = np.zeros(PER_TABLE, np.uint64)
    owners = np.zeros(PER_TABLE, np.uint16)
    for number, source in enumerate(sources):
        found = source.entries(index)
        if found is not None:
            has = (found & (_OFFSET | _ZEROS)) != 0
            entries[has] = found[has]
            owners[has] = number
    return _Part(index, entries, owners) if entries.any() else None


def _write_tables(descriptor: int, top: _Source, parts: Sequence[_Part], layout: _Layout) -> None:
    blocks_at = 1 + layout.reference_tables
    blocks = np.arange(blocks_at, blocks_at + layout.reference_blocks, dtype=np.uint64) * np.uint64(CLUSTER)
    os.pwrite(descriptor, header(top.size, top.tables, layout.first_level_at, layout.reference_tables), 0)
    os.pwrite(descriptor, blocks.astype(">u8").tobytes(), CLUSTER)
    os.pwrite(descriptor, struct.pack(">H", 1) * layout.total, blocks_at * CLUSTER)
    first = np.zeros(top.tables, np.uint64)
    data_at = layout.data_at
    for number, part in enumerate(parts):
        at = (layout.second_level_at + number) * CLUSTER
        first[part.index] = np.uint64(at) | _COPIED
        table = part.entries & _ZEROS
        where = part.data
        table[where] = (np.arange(len(where), dtype=np.uint64) + np.uint64(data_at)) * np.uint64(
            CLUSTER
        ) | _COPIED
        os.pwrite(descriptor, table.astype(">u8").tobytes(), at)
        data_at += len(where)
    os.pwrite(descriptor, first.astype(">u8").tobytes(), layout.first_level_at * CLUSTER)


def _write_data(descriptor: int, sources: Sequence[_Source], parts: Sequence[_Part], layout: _Layout) -> None:
    to = layout.data_at * CLUSTER
    for part in parts:
        for owner, at, count in _runs(part):
            source = sources[owner]
            # A cluster of which nothing was written is a hole, and so is it here.
            there = min(count, source.length - at)
            if there > 0:
                copy_range(source.descriptor, at, descriptor, to, there)
            to += count


def _runs(part: _Part) -> Iterator[tuple[int, int, int]]:
    """The data of a part in order, as pieces that lie in one piece: layer, offset and number of bytes."""
    where = part.data
    if not len(where):
        return
    owners = part.owners[where].astype(np.int64)
    offsets = (part.entries[where] & _OFFSET).astype(np.int64)
    begins = np.flatnonzero((np.diff(owners, prepend=-1) != 0) | (np.diff(offsets, prepend=-1) != CLUSTER))
    counts = np.diff(np.append(begins, len(where)))
    for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
        yield int(owners[begin]), int(offsets[begin]), count * CLUSTER
