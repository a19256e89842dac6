"""Soft-dirty bits: which pages a process wrote since they were cleared, where the kernel keeps them.

A kernel without CONFIG_MEM_SOFT_DIRTY accepts the clearing all the same and never sets a bit, which
would make every second capture empty. So whether they are there is found by doing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from pathlib import Path

from agentenv.errors import HostFault
from agentenv.vmm.transfer import PAGE

_BIT = 1 << 55
_CLEAR = "4"  # proc(5), /proc/PID/clear_refs


@cache
def available() -> bool:
    """Whether this kernel keeps soft-dirty bits: a page of our own is cleared and written.

    It walks this process's page tables once, which takes about a millisecond.
    """
    with mmap.mmap(-1, PAGE) as page:
        page[0] = 1
        try:
            clear(os.getpid())
            cleared = not _is_dirty(page)
            page[0] = 2
            return cleared and _is_dirty(page)
        except (HostFault, OSError):
            return False


def clear(pid: int) -> None:
    """Forget what the process has written so far. Its threads should be stopped, or what they write
    meanwhile is on either side.

    Raises:
        HostFault: the process is gone or may not be touched.
    """
    try:
        Path(f"/proc/{pid}/clear_refs").write_text(_CLEAR)
    except OSError as error:
        raise HostFault(f"soft-dirty bits of process {pid} cannot be cleared: {error}") from error


def _is_dirty(page: mmap.mmap) -> bool:
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        entry = os.pread(pagemap.fileno(), 8, address // PAGE * 8)
    return bool(int.from_bytes(entry, "little") & _BIT)
