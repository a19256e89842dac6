"""Figures of a sandbox over time, in a bounded piece of memory each."""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Self

from agentenv.sandbox.records import Sandbox

MIB = 1 << 20
# An hour of one sandbox at the pace of the sampler, about 80 bytes each.
KEEP_SAMPLES = 720
KEEP_ENDED = 64

_FORM = struct.Struct("=ddIQQQQQ")
_MOST = 2**63


class Sample(NamedTuple):
    """Figures at a moment (seconds since the epoch), sizes in bytes; `cpu_pct` is 0 to 100 of all processors
    together."""

    at: float
    cpu_pct: float
    cpus: int
    mem_used: int
    mem_total: int
    mem_cache: int
    disk_used: int
    disk_total: int


class Guest(NamedTuple):
    """What the guest said of itself, within what it can be; bytes."""

    mem_used: int
    mem_total: int
    mem_cache: int
    disk_used: int
    disk_total: int

    @classmethod
    def of(cls, document: Mapping[str, object], sandbox: Sandbox) -> Self:
        """From the agent's document. What the guest says is nowhere more than the sandbox has."""
        memory, disk = sandbox.memory_mib * MIB, sandbox.disk_mib * MIB
        mem_total = _within(document.get("mem_total"), memory) or memory
        disk_total = _within(document.get("disk_total"), disk) or disk
        return cls(
            _within(document.get("mem_used"), mem_total),
            mem_total,
            _within(document.get("mem_cache"), mem_total),
            _within(document.get("disk_used"), disk_total),
            disk_total,
        )


def _within(value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return min(max(0, value), most)


def host_guess(sandbox: Sandbox, resident: int) -> Guest:
    """The figures of a guest that never said any: what its machine holds of the host's memory; of its disk
    nothing is known."""
    memory = sandbox.memory_mib * MIB
    return Guest(min(resident, memory), memory, 0, 0, sandbox.disk_mib * MIB)


def cpu_pct(seconds: float, elapsed_s: float, cpus: int) -> float:
    """The share of `cpus` processors that a machine took, in percent. Its own threads and what it emulates
    count too, so it is cut at all there is."""
    if elapsed_s <= 0:
        return 0.0
    return round(min(100.0, max(0.0, 100.0 * seconds / elapsed_s / cpus)), 2)


class Histories:
    """The samples of each sandbox, the last ones of those that have ended too."""

    def __init__(self, keep: int = KEEP_SAMPLES, ended: int = KEEP_ENDED) -> None:
        self._keep, self._keep_ended = keep, ended
        self._samples: dict[str, deque[bytes]] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, sandbox_id: str) -> bool:
        return sandbox_id in self._samples

    def add(self, sandbox_id: str, sample: Sample) -> None:
        """Keep one more; the oldest beyond the bound goes."""
        history = self._samples.setdefault(sandbox_id, deque(maxlen=self._keep))
        history.append(_FORM.pack(*(min(field, _MOST) for field in sample)))

    def end(self, sandbox_id: str) -> None:
        """A sandbox has ended: its samples are kept until enough others have."""
        if sandbox_id not in self._samples:
            return
        self._ended[sandbox_id] = None
        while len(self._ended) > self._keep_ended:
            del self._samples[self._ended.popitem(last=False)[0]]

    def last(self, sandbox_id: str) -> Sample | None:
        """The newest."""
        history = self._samples.get(sandbox_id)
        return Sample(*_FORM.unpack(history[-1])) if history else None

    def of(self, sandbox_id: str, start: float | None = None, end: float | None = None) -> Iterator[Sample]:
        """Those from `start` to `end` (seconds since the epoch), both included by whole seconds, oldest
        first."""
        for packed in self._samples.get(sandbox_id, ()):
            sample = Sample(*_FORM.unpack(packed))
            if (start is None or sample.at >= start) and (end is None or int(sample.at) <= end):
                yield sample
