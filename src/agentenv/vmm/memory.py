"""The memory of a guest in layers: what a capture keeps, what a restore writes, and what folding makes.

An image is a flat base file and deltas above it, oldest first. A machine starts with the base mapped
privately; `apply` then writes the deltas' pages into it, each page once and from the newest delta that
has it. `capture` keeps the pages that differ from the image a machine came from. All functions here
block, and run well in a thread: the interpreter lock is released while pages move.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from agentenv.errors import HostFault, StoreCorrupt
from agentenv.vmm.layer import Delta, Source, encode_map
from agentenv.vmm.pagemap import Mapping, mapping_of, private_pages
from agentenv.vmm.stored import map_of, new_files, unreadable
from agentenv.vmm.transfer import PAGE, Addresses, Pages, gather, runs, scatter

BATCH = 256  # pages moved at once: 1 MiB, which stays in the processor's cache
LONG_RUN = 16  # pages
LANES = min(4, os.cpu_count() or 1)  # threads that move pages at once; the vcpus stand still meanwhile

Words = npt.NDArray[np.uint64]

S = TypeVar("S", bound=Source)
T = TypeVar("T")

_FILE_BITS = 47  # more than the bytes of any memory
_FICLONE = 0x40049409  # ioctl_ficlone(2)
_CANNOT_CLONE = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS)


@dataclass(frozen=True)
class Captured:
    """What a capture or merge wrote. `pages` are held by the new layer; `private` is how many the
    machine had of its own, the rest of which were as in the image it came from."""

    memory: Path
    pages: int
    private: int

    @property
    def bytes(self) -> int:
        """Length of the `memory` file."""
        return self.pages * PAGE


class Image:
    """A guest's memory in layers, open and checked. A context manager; not changed once open.

    Args:
        base: the flat file.
        deltas: oldest first; their maps lie beside them.
        size: bytes that the memory has, where that is known from a record.

    Raises:
        StoreCorrupt: a layer is missing, damaged, cut short, or of another memory's size.
    """

    def __init__(self, base: Path, deltas: Sequence[Path] = (), *, size: int | None = None) -> None:
        self._stack = ExitStack()
        try:
            self._base = self._take(Source(base))
            self._deltas = [self._take(Delta(path)) for path in deltas]
            self._check(size)
            self._place()
        except BaseException:
            self._stack.close()
            raise

    def _take(self, source: S) -> S:
        self._stack.callback(source.close)
        return source

    def _check(self, size: int | None) -> None:
        base = self._base
        if base.size % PAGE or not base.size or (size is not None and base.size != size):
            wanted = f"the {size} of its record" if size is not None else "whole pages"
            raise StoreCorrupt(f"the memory file {base.path} has {base.size} bytes, not {wanted}")
        for delta in self._deltas:
            if delta.total != self.pages:
                raise StoreCorrupt(
                    f"the memory layer {delta.path} is of a memory of {delta.total} pages, "
                    f"its base has {self.pages}"
                )

    def _place(self) -> None:
        """Decide for each page which layer has its newest copy, and where in that layer."""
        self._owner = np.zeros(self.pages, np.uint16)
        self._slot = np.arange(self.pages, dtype=np.uint32)
        for number, delta in enumerate(self._deltas, 1):
            self._owner[delta.pages] = number
            self._slot[delta.pages] = np.arange(len(delta.pages), dtype=np.uint32)
        self._starts = np.array([self._base.address, *(d.address for d in self._deltas)], np.uint64)

    @property
    def pages(self) -> int:
        """Pages of the whole memory."""
        return self._base.size // PAGE

    @property
    def base(self) -> Path:
        return self._base.path

    @property
    def deltas(self) -> tuple[Path, ...]:
        return tuple(delta.path for delta in self._deltas)

    def above_base(self) -> Pages:
        """The pages whose newest copy is in a delta."""
        return np.flatnonzero(self._owner).astype(np.uint32)

    def addresses(self, pages: Pages) -> Addresses:
        """Where the newest copy of each page is mapped in this process, for `transfer` only."""
        return self._starts[self._owner[pages]] + self._slot[pages].astype(np.uint64) * np.uint64(PAGE)

    def _places(self, pages: Pages) -> Addresses:
        """Numbers that follow one another where the newest copies do in one and the same file: two files may
        well be mapped side by side."""
        file = self._owner[pages].astype(np.uint64) << np.uint64(_FILE_BITS)
        return file + self._slot[pages].astype(np.uint64) * np.uint64(PAGE)

    def read(self, pages: Pages, into: Words) -> None:
        """Copy the newest copy of each page to `into`.

        Raises:
            StoreCorrupt: a layer cannot be read.
        """
        starts, counts = runs(self._places(pages))
        if len(starts) * LONG_RUN > len(pages):
            gather(os.getpid(), self.addresses(pages), into.ctypes.data)
            return
        # Long runs come faster by read(2): no page of the mapping has to be made present first.
        content, sources = into.data.cast("B"), (self._base, *self._deltas)
        for page, count in zip(pages[starts].tolist(), counts.tolist(), strict=True):
            source, length = sources[self._owner[page]], count * PAGE
            try:
                got = os.preadv(source.descriptor, [content[:length]], int(self._slot[page]) * PAGE)
            except OSError as error:
                raise unreadable(source.path, error) from error
            if got != length:
                raise StoreCorrupt(f"the memory layer {source.path} was cut short while it was in use")
            content = content[length:]

    def copy_onto(self, descriptor: int) -> None:
        """Write the deltas' newest pages at their own offsets of a file."""
        pages = self.above_base()
        starts, counts = runs(self._places(pages), pages.astype(np.uint64) * np.uint64(PAGE))
        for page, count in zip(pages[starts].tolist(), counts.tolist(), strict=True):
            source, at = self._deltas[self._owner[page] - 1], int(self._slot[page])
            copy_range(source.descriptor, at * PAGE, descriptor, page * PAGE, count * PAGE)

    def require_whole(self) -> None:
        """Raise StoreCorrupt if a layer was cut short since it was opened."""
        for source in (self._base, *self._deltas):
            if os.fstat(source.descriptor).st_size < source.size:
                raise StoreCorrupt(f"the memory layer {source.path} was cut short while it was in use")

    def close(self) -> None:
        """Let the files go; repeatable."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Buffers:
    """Memory for three batches, taken once: fresh memory would cost more than the copying. It is aligned to
    pages, since the kernel copies ten times slower to where it is not."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 3 * BATCH * PAGE)
        words = np.frombuffer(self._memory, np.uint64).reshape(3, BATCH, PAGE // 8)
        self.theirs, self.before, self.kept = words
        self.differs = np.empty((BATCH, PAGE // 8), np.bool_)


def capture(
    pid: int, image: Image, into: Path, *, mapped: Path | None = None, soft_dirty: bool = False
) -> Captured:
    """Write the pages of a stopped machine that differ from `image` into a new delta above it.

    Args:
        pid: its process.
        image: what it was restored from, and the deltas captured of it since.
        into: the delta's `memory` file; its map goes beside it. Neither may exist.
        mapped: the flat file that the process maps, where it is not the image's base: the layers may have
            been folded while the machine ran, and an image of the same content serves as well.
        soft_dirty: look only at pages written since `softdirty.clear`, when `image` was its memory.

    Raises:
        HostFault: the process is gone or does not map the base. StoreFull, StoreFault: the layer cannot
            be written; nothing of it is left. StoreCorrupt: the image cannot be read.
    """
    mapping = mapping_of(pid, mapped or image.base)
    if mapping.pages != image.pages:
        raise HostFault(f"process {pid} has {mapping.pages} pages of memory, its image {image.pages}")
    private = private_pages(mapping, soft_dirty=soft_dirty)

    def changed(batch: Pages, buffers: Buffers) -> Batch | None:
        return _differing(mapping, image, batch, buffers)

    return Captured(into, _write_delta(into, image.pages, private, changed), len(private))


def apply(pid: int, image: Image) -> int:
    """Write the image's deltas into a stopped process that has its base mapped privately; returns the
    number of pages. Before the device state is loaded, that is: loading it may touch memory too.

    Raises:
        HostFault: the process is gone or does not map the base. StoreCorrupt: a layer cannot be read.
    """
    pages = image.above_base()
    if len(pages):
        mapping = mapping_of(pid, image.base)
        try:
            _side_by_side(
                lambda part: scatter(pid, image.addresses(part), mapping.addresses(part)),
                np.array_split(pages, LANES),
            )
        except HostFault:
            image.require_whole()  # the kernel does not say on which side it failed
            raise
    return len(pages)


def merge(image: Image, into: Path) -> Captured:
    """Make one delta of all deltas of an image, each page from the newest.

    Raises:
        StoreFull, StoreFault: it cannot be written; nothing of it is left. StoreCorrupt: see `capture`.
    """
    pages = image.above_base()

    def newest(batch: Pages, buffers: Buffers) -> Batch:
        content = buffers.before[: len(batch)]
        image.read(batch, content)
        return batch, content.data

    return Captured(into, _write_delta(into, image.pages, pages, newest), len(pages))


def fold(image: Image, into: Path) -> None:
    """Make a new flat file of an image, sparse where its base is; sharing blocks where the filesystem can.

    Raises:
        StoreFull, StoreFault: it cannot be written; nothing of it is left.
    """
    with new_files() as make:
        descriptor = make(into)
        clone(image.base, descriptor)
        image.copy_onto(descriptor)


Batch = tuple[Pages, memoryview]
Pick = Callable[[Pages, Buffers], Batch | None]
"""Of a batch of pages, those that a delta is to hold, and their bytes, which may lie in the buffers."""


def _differing(mapping: Mapping, image: Image, batch: Pages, buffers: Buffers) -> Batch | None:
    """Those pages of a batch that differ from the image, if any."""
    size = len(batch)
    theirs, before = buffers.theirs[:size], buffers.before[:size]
    gather(mapping.pid, mapping.addresses(batch), theirs.ctypes.data)
    image.read(batch, before)
    differs = np.not_equal(theirs, before, out=buffers.differs[:size]).any(axis=1)
    count = int(np.count_nonzero(differs))
    if count == size:
        return batch, theirs.data
    if not count:
        return None
    kept = buffers.kept[:count]
    np.compress(differs, theirs, axis=0, out=kept)
    return batch[differs], kept.data


def _batches(pages: Pages) -> Iterator[Pages]:
    for begin in range(0, len(pages), BATCH):
        yield pages[begin : begin + BATCH]


def _write_delta(into: Path, total: int, pages: Pages, pick: Pick) -> int:
    """Write a delta of what `pick` takes of `pages`; returns how many they are.

    Each lane takes every so many-th batch, and a batch goes to where the file ends by then: lanes that wait
    for each other would cost more than they save."""
    held: list[Pages] = []
    end, turn = 0, threading.Lock()
    batches = list(_batches(pages))
    with new_files() as make:
        memory = make(into)

        def lane(batches: Sequence[Pages]) -> None:
            nonlocal end
            buffers = Buffers()
            for batch in batches:
                picked = pick(batch, buffers)
                if picked is None:
                    continue
                with turn:
                    at, end = end, end + len(picked[0]) * PAGE
                    held.append(picked[0])
                _write_whole(memory, picked[1].cast("B"), at)

        _side_by_side(lane, [batches[first::LANES] for first in range(min(LANES, len(batches)))])
        everything = np.concatenate(held) if held else np.empty(0, np.uint32)
        _write_whole(make(map_of(into)), memoryview(encode_map(everything, total)), 0)
    return len(everything)


def _side_by_side(work: Callable[[T], None], parts: Sequence[T]) -> None:
    """Do each part on a thread of its own; the first failure is raised when all have ended."""
    with ThreadPoolExecutor(LANES, "memory") as lanes:
        for _ in lanes.map(work, parts):
            pass


def _write_whole(descriptor: int, content: memoryview, at: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, at)
        content, at = content[written:], at + written


def clone(source: Path, descriptor: int) -> None:
    """Make an empty file the same as `source`: sharing its blocks, or else copying what is not a hole.

    Raises:
        OSError: it cannot be written. StoreCorrupt, StoreFault: the source cannot be read.
    """
    try:
        original = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(source, error) from error
    try:
        try:
            fcntl.ioctl(descriptor, _FICLONE, original)
            return
        except OSError as error:
            if error.errno not in _CANNOT_CLONE:
                raise
        size = os.fstat(original).st_size
        os.ftruncate(descriptor, size)
        for start, end in _data(original, size):
            copy_range(original, start, descriptor, start, end - start)
    finally:
        os.close(original)


def _data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, end


def copy_range(source: int, at: int, target: int, to: int, count: int) -> None:
    """Copy bytes between two open files within the kernel, sharing blocks where it can.

    Raises:
        OSError: it cannot be written. StoreCorrupt: the source ended early.
    """
    while count:
        try:
            moved = os.copy_file_range(source, target, count, at, to)
        except OSError as error:
            if error.errno not in _CANNOT_CLONE:
                raise
            moved = os.pwrite(target, os.pread(source, min(count, BATCH * PAGE), at), to)
        if not moved:
            raise StoreCorrupt("a memory layer ended while it was copied")
        at, to, count = at + moved, to + moved, count - moved
