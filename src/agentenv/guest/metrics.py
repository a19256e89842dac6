"""What `GET /metrics` reports: processor, memory and disk of the whole guest.

Sources: /proc/stat, /proc/meminfo and statvfs of the root directory. Field names are E2B's; sizes
are bytes unless the name ends in `_mib`, and `ts` is Unix time in seconds.
"""

from __future__ import annotations

import os
import time

from agentenv.guest.http import Request, Response, json_response

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentenv.guest.context import Context
    from agentenv.guest.http import Router

_MIB = 1024 * 1024


def register(router: Router, context: Context) -> None:
    """Serve `GET /metrics`."""
    metrics = Metrics()

    async def get_metrics(request: Request) -> Response:
        return json_response(metrics.read())

    router.add("GET", "/metrics", get_metrics)


class CpuTimes:
    """Processor time since boot, in clock ticks, summed over all processors."""

    __slots__ = ("busy", "total")

    def __init__(self, busy: int, total: int) -> None:
        self.busy = busy
        self.total = total


def parse_stat(text: str) -> CpuTimes:
    """The first line of /proc/stat; idle and waiting for I/O count as not busy."""
    fields = [int(field) for field in text.split("\n", 1)[0].split()[1:9]]
    # guest and guest_nice (fields 9 and 10) are already part of user and nice: see proc_stat(5).
    total = sum(fields)
    return CpuTimes(busy=total - fields[3] - fields[4], total=total)


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo as bytes by name."""
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields:
            sizes[name] = int(fields[0]) * (1024 if fields[-1] == "kB" else 1)
    return sizes


def used_percent(before: CpuTimes, after: CpuTimes) -> float:
    """Busy share of the time between two readings, 0 to 100, rounded to two decimals."""
    elapsed = after.total - before.total
    if elapsed <= 0:
        return 0.0
    return round(min(100.0, max(0.0, 100.0 * (after.busy - before.busy) / elapsed)), 2)


class Metrics:
    """Readings over time: processor use is the share since the reading before.

    The first reading covers the time since the object was made.
    """

    def __init__(self) -> None:
        self._cpu = _cpu_times()

    def read(self) -> dict[str, float | int]:
        """One reading, as the body of `GET /metrics`."""
        before, self._cpu = self._cpu, _cpu_times()
        memory = parse_meminfo(_text("/proc/meminfo"))
        total = memory.get("MemTotal", 0)
        cached = memory.get("Cached", 0) + memory.get("SReclaimable", 0)
        used = max(0, total - memory.get("MemAvailable", memory.get("MemFree", 0)))
        disk = os.statvfs("/")
        return {
            "ts": int(time.time()),
            "cpu_count": os.cpu_count() or 1,
            "cpu_used_pct": used_percent(before, self._cpu),
            "mem_total": total,
            "mem_used": used,
            "mem_cache": cached,
            "mem_total_mib": total // _MIB,
            "mem_used_mib": used // _MIB,
            "disk_used": (disk.f_blocks - disk.f_bavail) * disk.f_frsize,
            "disk_total": disk.f_blocks * disk.f_frsize,
        }


def _cpu_times() -> CpuTimes:
    return parse_stat(_text("/proc/stat"))


def _text(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()
