"""The host's TSC rate, which a guest under software emulation is told, since it cannot measure it.

The kernel says it once, at boot, in a log that may be unreadable or overwritten; else it is measured
with the instruction itself, which agrees to about ten parts in a million.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from agentenv.errors import HostFault

_SYSFS = Path("/sys/devices/system/cpu/cpu0/tsc_freq_khz")  # not in every kernel
_DETECTED = re.compile(r"tsc: (?:Detected|Refined TSC clocksource calibration:) ([0-9.]+) MHz")
# rdtsc; shl rdx, 32; or rax, rdx; ret
_READ_TSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")
_WINDOW_S = 0.02
_WINDOWS = 5
_TRIES = 20


@cache
def khz() -> int:
    """The rate in kHz; the same for as long as this process lives.

    Raises:
        HostFault: it can neither be read nor measured.
    """
    return from_sysfs() or from_log(kernel_log()) or measured()


def from_sysfs() -> int | None:
    """The rate that sysfs says, where it does."""
    try:
        return int(_SYSFS.read_text())
    except (OSError, ValueError):
        return None


def from_log(log: str) -> int | None:
    """The rate that the kernel found at boot, the last word of its log on it."""
    found = _DETECTED.findall(log)
    return round(float(found[-1]) * 1000) if found else None


def kernel_log() -> str:
    """The kernel's log from its beginning, or what may be read of it."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    records = []
    try:
        while True:
            try:
                records.append(os.read(descriptor, 8192))
            except BrokenPipeError:  # a record was overwritten while we read; the next one is there
                continue
            except OSError:  # EAGAIN: that was all
                return b"".join(records).decode(errors="replace")
    finally:
        os.close(descriptor)


def measured() -> int:
    """The rate against the kernel's raw clock: the median of a few short windows.

    Raises:
        HostFault: memory that may be executed is refused here.
    """
    try:
        with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
            page.write(_READ_TSC)
            held = ctypes.c_char.from_buffer(page)
            read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(held))
            rates = [_rate(read) for _ in range(_WINDOWS)]
            del held, read  # the mapping cannot be closed while one refers to it
    except OSError as error:
        raise HostFault(
            f"the TSC rate can neither be read nor measured: {error.strerror}",
            remedy="a host with KVM, or without what forbids executable memory",
        ) from None
    return round(statistics.median(rates))


def _rate(read: Callable[[], int]) -> float:
    begin_clock, begin_ticks = _together(read)
    time.sleep(_WINDOW_S)
    end_clock, end_ticks = _together(read)
    return (end_ticks - begin_ticks) * 1_000_000 / (end_clock - begin_clock)


def _together(read: Callable[[], int]) -> tuple[float, int]:
    """Clock (ns) and counter at one moment: of several tries the one least disturbed."""
    tries = []
    for _ in range(_TRIES):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        ticks = read()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        tries.append((after - before, (before + after) / 2, ticks))
    _, clock, ticks = min(tries)
    return clock, ticks
