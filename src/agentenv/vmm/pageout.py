"""Memory of a process written to the host's swap: process_madvise(2) with MADV_PAGEOUT.

The process goes on; what it touches comes back from swap. Pages of files are dropped, and read again.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from agentenv.errors import HostFault

_PROCESS_MADVISE = 440  # the same number on all architectures (Linux 5.10)
_MADV_PAGEOUT = 21
_RANGES_MAX = os.sysconf("SC_IOV_MAX")
_BYTES_MAX = 1 << 30  # a call advises less than 2 GiB

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def page_out(pid: int) -> int:
    """Page out what a process maps privately; returns the bytes that this was advised for. Blocking.

    Raises:
        HostFault: the process is gone, or the kernel refuses.
    """
    try:
        found = ranges_in(Path(f"/proc/{pid}/maps").read_text())
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        raise HostFault(f"the memory of process {pid} cannot be looked up: {error}") from error
    try:
        return sum(_advise(descriptor, pid, each) for each in batches(found))
    finally:
        os.close(descriptor)


def ranges_in(maps: str) -> list[tuple[int, int]]:
    """Address and length of the private, writable mappings in the text of a `maps` file, stacks left out."""
    found = []
    for line in maps.splitlines():
        bounds, modes, *rest = line.split(maxsplit=5)
        name = rest[3] if len(rest) > 3 else ""
        if modes.startswith("rw") and modes.endswith("p") and not name.startswith("[stack"):
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            found.append((start, end - start))
    return found


def batches(ranges: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The ranges in lots that one call takes, large ones in pieces."""
    lots: list[list[tuple[int, int]]] = [[]]
    room = _BYTES_MAX
    for start, length in ranges:
        while length:
            piece = min(length, room)
            lots[-1].append((start, piece))
            start, length, room = start + piece, length - piece, room - piece
            if not room or len(lots[-1]) == _RANGES_MAX:
                lots.append([])
                room = _BYTES_MAX
    return [lot for lot in lots if lot]


def _advise(descriptor: int, pid: int, ranges: list[tuple[int, int]]) -> int:
    vector = (_Range * len(ranges))(*(_Range(*each) for each in ranges))
    done = _libc.syscall(
        ctypes.c_long(_PROCESS_MADVISE),
        ctypes.c_long(descriptor),
        vector,
        ctypes.c_ulong(len(ranges)),
        ctypes.c_long(_MADV_PAGEOUT),
        ctypes.c_ulong(0),
    )
    if done < 0:
        number = ctypes.get_errno()
        raise HostFault(f"process {pid} cannot be paged out: {os.strerror(number)}")
    return int(done)
