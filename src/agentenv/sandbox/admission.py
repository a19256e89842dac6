"""What a node may promise: memory, disk, virtual cpus and sandboxes, counted before anything is made.

Whoever wants a machine reserves first; a reservation is one synchronous step, so of a burst exactly as
many get in as there is room for. What pools hold in advance is only lent: it gives way to real demand.
Promises may exceed what the host has (the overcommit factors), since guests share most of their memory
and seldom use all that they may; what the host really has left is looked at besides.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from agentenv.config import Settings
from agentenv.errors import CapacityExceeded, InvalidRequest

MIB = 1 << 20
RETRY_AFTER_S = 5

# A hypervisor's own part of a machine: about 50 MiB under software emulation, less with KVM.
OVERHEAD_MIB = 64
# What a machine takes of the host soon after its start: the above, and the pages that the guest touches.
STARTING_MIB = 96

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_UNITS = {
    "memory_mib": "MiB of memory",
    "disk_mib": "MiB of disk",
    "vcpus": "vcpus",
    "sandboxes": "sandboxes",
}
_RAISED_BY = {
    "memory_mib": "AENV_MEMORY_OVERCOMMIT or AENV_MEMORY_BUDGET_MIB",
    "disk_mib": "AENV_DISK_OVERCOMMIT or AENV_DISK_BUDGET_MIB",
    "vcpus": "AENV_VCPU_OVERCOMMIT",
    "sandboxes": "AENV_MAX_SANDBOXES",
}


@dataclass(frozen=True)
class Need:
    """What something takes of a node, or how much there is; a difference may be negative."""

    memory_mib: int = 0
    disk_mib: int = 0
    vcpus: int = 0
    sandboxes: int = 0

    @classmethod
    def running(cls, *, vcpus: int, memory_mib: int, disk_mib: int) -> Need:
        """A sandbox with a machine."""
        return cls(memory_mib + OVERHEAD_MIB, disk_mib, vcpus, 1)

    @classmethod
    def paused(cls, *, disk_mib: int) -> Need:
        """A sandbox without one: no memory and no processor are held for it."""
        return cls(disk_mib=disk_mib, sandboxes=1)

    def __add__(self, other: Need) -> Need:
        return Need(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def __sub__(self, other: Need) -> Need:
        return Need(*(getattr(self, name) - getattr(other, name) for name in _NAMES))

    def short_of(self, other: Need) -> list[str]:
        """In which dimensions this is less than `other`, where `other` wants any."""
        return [name for name in _NAMES if 0 < getattr(other, name) > getattr(self, name)]


_NAMES = tuple(field.name for field in fields(Need))
_NOTHING = Need()


@dataclass(frozen=True)
class Budget:
    """How much may be promised in all, and how many MiB of the host must stay free besides."""

    total: Need
    memory_floor_mib: int = 0
    disk_floor_mib: int = 0

    @classmethod
    def of(cls, settings: Settings) -> Budget:
        """The settings' budget on this host."""
        memory = settings.memory_budget_mib or host_memory_mib()
        disk = settings.disk_budget_mib or shutil.disk_usage(settings.home).total // MIB
        total = Need(
            memory_mib=int(memory * settings.memory_overcommit),
            disk_mib=int(disk * settings.disk_overcommit),
            vcpus=int((os.cpu_count() or 1) * settings.vcpu_overcommit),
            sandboxes=settings.max_sandboxes,
        )
        return cls(total, settings.memory_floor_mib, settings.disk_floor_mib)


@dataclass(frozen=True)
class Free:
    """What a host has left, MiB."""

    memory_mib: int
    disk_mib: int


def host_free(home: Path) -> Free:
    """What this host has left now: memory that can be had without swapping, and space for data."""
    return Free(meminfo_mib("MemAvailable"), shutil.disk_usage(home).free // MIB)


def host_memory_mib() -> int:
    """The host's memory, or what the control group at the root of our view of it may use."""
    limits = [meminfo_mib("MemTotal")]
    for path in _CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:  # the other version of control groups, or none
            continue
        if text.isdecimal():
            limits.append(int(text) // MIB)
    return min(limits)


class Admission:
    """The reservations of one node, by owner. No method awaits anything.

    Args:
        budget: what may be promised.
        free: asked at each reservation what the host really has left.
    """

    def __init__(self, budget: Budget, free: Callable[[], Free]) -> None:
        self.budget = budget
        self._free = free
        self._held: dict[str, Need] = {}
        self._starting: set[str] = set()
        self._lent: dict[str, Need] = {}
        self._host_pressed = False
        self._pressed: list[Callable[[], None]] = []

    def reserve(self, owner: str, need: Need) -> None:
        """Hold `need` for `owner` from now on, instead of what it held; on a refusal nothing changes.

        What is lent does not count: where it is in the way, those who asked to be are told at once.

        Raises:
            CapacityExceeded: there is no room now; says how much there is.
            InvalidRequest: there never will be.
        """
        before = self._held.get(owner, Need())
        self.check(need, before)
        self._held[owner] = need
        if need.memory_mib > before.memory_mib:
            self._starting.add(owner)
        self.press()

    def commit(self, owner: str) -> None:
        """The machine runs: from now on what it takes shows in the host's own figures."""
        self._starting.discard(owner)

    def release(self, owner: str) -> None:
        """Hold nothing for `owner` any more, lent or not. Repeatable."""
        self._held.pop(owner, None)
        self._lent.pop(owner, None)
        self._starting.discard(owner)

    def adopt(self, owner: str, need: Need) -> None:
        """Count what is there, whether there is room or not: what an earlier life of this node promised,
        and what takes less than before."""
        self._held[owner] = need

    def lend(self, owner: str, need: Need) -> bool:
        """Hold `need` for a pool, if there is room that nobody asks for."""
        self._host_pressed = self._short_of_host(self._free(), give_back=False) is not None
        if self._host_pressed or self.room.short_of(need):
            return False
        self._lent[owner] = need
        return True

    def on_pressure(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when what is lent stands in the way of what is promised."""
        self._pressed.append(callback)

    def press(self) -> None:
        """Tell those who borrow to give back, if they have to."""
        if self._lent and any(getattr(self.room, name) < 0 for name in _NAMES):
            for callback in self._pressed:
                callback()

    @property
    def promised(self) -> Need:
        """What is reserved, without what is lent."""
        return sum(self._held.values(), Need())

    @property
    def lent(self) -> Need:
        """What pools hold."""
        return sum(self._lent.values(), Need())

    @property
    def room(self) -> Need:
        """What is neither promised nor lent; negative where pools have to give back."""
        room = self.budget.total - self.promised - self.lent
        if self._host_pressed:
            return replace(room, memory_mib=min(room.memory_mib, -self.lent.memory_mib))
        return room

    def check(self, need: Need, before: Need = _NOTHING) -> None:
        """Refuse what there is no room for, and hold nothing; `before` is held for it already.

        Raises:
            CapacityExceeded, InvalidRequest: as `reserve`.
        """
        more = need - before
        impossible = self.budget.total.short_of(need)
        if impossible:
            raise InvalidRequest(
                f"it needs {_amount(need, impossible[0])},"
                f" and this node has {_amount(self.budget.total, impossible[0])}",
                remedy=f"ask for less, or raise {_RAISED_BY[impossible[0]]}",
            )
        promised = self.promised
        short = (self.budget.total - promised).short_of(more)
        if short:
            figures = ", ".join(
                f"{getattr(promised, name)} of {_amount(self.budget.total, name)} are promised"
                f" and it needs {getattr(more, name)}"
                for name in short
            )
            raise _full(figures, f"kill or pause some sandboxes, or raise {_RAISED_BY[short[0]]}")
        if more.memory_mib > 0:
            free = self._free()
            self._host_pressed = self._short_of_host(free, give_back=False) is not None
            if why := self._short_of_host(free, give_back=True):
                raise _full(why, "kill or pause some sandboxes, or free memory and disk space of the host")

    def _short_of_host(self, free: Free, *, give_back: bool) -> str | None:
        """Why one more machine is too many for the host itself, or None; if pools give back or not."""
        back = len(self._lent) * OVERHEAD_MIB if give_back else 0
        memory = free.memory_mib + back - (len(self._starting) + 1) * STARTING_MIB
        if memory < self.budget.memory_floor_mib:
            return (
                f"the host has {free.memory_mib} MiB of memory left, of which"
                f" {self.budget.memory_floor_mib} stay free (AENV_MEMORY_FLOOR_MIB),"
                f" and {len(self._starting)} machines are starting"
            )
        if free.disk_mib < self.budget.disk_floor_mib:
            return (
                f"the data directory has {free.disk_mib} MiB left, of which {self.budget.disk_floor_mib} stay"
                " free (AENV_DISK_FLOOR_MIB)"
            )
        return None


def _full(figures: str, remedy: str) -> CapacityExceeded:
    return CapacityExceeded(f"the node is full: {figures}", remedy=remedy, retry_after=RETRY_AFTER_S)


def _amount(need: Need, name: str) -> str:
    return f"{getattr(need, name)} {_UNITS[name]}"


def meminfo_mib(name: str) -> int:
    """A figure of /proc/meminfo (proc(5)) in MiB; 0 where there is none of that name."""
    for line in _MEMINFO.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) // 1024
    return 0
