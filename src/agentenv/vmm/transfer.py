"""Moving pages between a process's memory and ours: process_vm_readv(2) and process_vm_writev(2).

One call moves up to 1024 runs of pages, with the interpreter lock released: a page here and a page
there, which is how guests dirty their memory, costs a few calls per MiB rather than two per run. Our
own mappings of layer files are read the same way, since a mapped file that fails to be read (a bad
disk, a file cut short) is then an error of the call and not a signal that ends the node.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from agentenv.errors import HostFault, HostIncapable, StoreCorrupt

PAGE = os.sysconf("SC_PAGE_SIZE")
RUNS_MAX = os.sysconf("SC_IOV_MAX")

Pages = npt.NDArray[np.uint32]
"""Page numbers of a guest's memory, each once."""

Addresses = npt.NDArray[np.uint64]
"""Where pages lie in a process's address space, one address a page."""

_libc = ctypes.CDLL(None, use_errno=True)
_SIGNATURE = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.argtypes = _SIGNATURE
    _call.restype = ctypes.c_ssize_t


def runs(*columns: Addresses) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Where each run of pages begins and how many it has; a run is contiguous in every column."""
    if not len(columns[0]):
        return np.empty(0, np.intp), np.empty(0, np.intp)
    broken = np.zeros(len(columns[0]) - 1, bool)
    for column in columns:
        broken |= np.diff(column) != PAGE
    starts = np.concatenate(([0], np.flatnonzero(broken) + 1))
    return starts, np.diff(np.append(starts, len(columns[0])))


def pages_of(firsts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Pages:
    """The pages of runs, each given by its first page and how many it has."""
    before = np.cumsum(counts) - counts
    return (np.repeat(firsts - before, counts) + np.arange(int(counts.sum()))).astype(np.uint32)


def gather(pid: int, source: Addresses, target: int) -> None:
    """Copy pages of a process to our address `target`, one after the other.

    Raises:
        HostFault: the process is gone, or has no such memory. HostIncapable: this is not allowed here.
        StoreCorrupt: `pid` is this process, and the file behind a mapping cannot be read.
    """
    for part in _parts(*runs(source)):
        starts, counts = part
        total = int(counts.sum()) * PAGE
        remote = _vectors(source[starts], counts)
        local = np.array([[target, total]], np.uint64)
        moved = _libc.process_vm_readv(pid, local.ctypes.data, 1, remote.ctypes.data, len(remote), 0)
        _require(pid, moved, total)
        target += total


def scatter(pid: int, source: Addresses, target: Addresses) -> None:
    """Copy pages at our addresses `source` to those of a process at `target`.

    Raises:
        HostFault: the process is gone, or has no such memory. HostIncapable: this is not allowed here.
    """
    for starts, counts in _parts(*runs(source, target)):
        local, remote = _vectors(source[starts], counts), _vectors(target[starts], counts)
        moved = _libc.process_vm_writev(
            pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
        )
        _require(pid, moved, int(counts.sum()) * PAGE)


def _parts(
    starts: npt.NDArray[np.intp], counts: npt.NDArray[np.intp]
) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
    for begin in range(0, len(starts), RUNS_MAX):
        yield starts[begin : begin + RUNS_MAX], counts[begin : begin + RUNS_MAX]


def _vectors(addresses: Addresses, counts: npt.NDArray[np.intp]) -> Addresses:
    """An array of `struct iovec`."""
    vectors = np.empty((len(addresses), 2), np.uint64)
    vectors[:, 0] = addresses
    vectors[:, 1] = counts * PAGE
    return vectors


def _require(pid: int, moved: int, total: int) -> None:
    if moved == total:
        return
    number = ctypes.get_errno() if moved < 0 else errno.EFAULT
    if number in (errno.EPERM, errno.ENOSYS):
        raise HostIncapable(
            f"the memory of process {pid} cannot be reached: {os.strerror(number)}",
            remedy="run as root; kernel.yama.ptrace_scope must be below 3, and a container needs SYS_PTRACE",
        )
    if number == errno.ESRCH:
        raise HostFault(f"process {pid} is gone")
    if pid == os.getpid():
        raise StoreCorrupt("a memory layer became unreadable while it was read")
    raise HostFault(f"the memory of process {pid} cannot be moved: {os.strerror(number)}")
