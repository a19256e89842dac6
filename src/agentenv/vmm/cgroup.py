"""Limits for a machine's process, by control groups of version 1 or 2, where the host has them.

What the host offers is worked out once from three texts of /proc; without any usable controller the
machines run without limits and `Cgroups.missing` says why.
"""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from agentenv.limits import DiskLimits

CONTROLLERS = ("cpu", "io", "memory", "pids")
_OLD_NAMES = {"io": "blkio"}  # of version 1
_PERIOD_US = 100_000
_EMPTY_LIMIT_S = 5.0


@dataclass(frozen=True)
class Limits:
    """`cpus` processors' worth of time, bytes of memory with page cache, processes and threads."""

    cpus: float
    memory_bytes: int
    tasks: int


@dataclass(frozen=True)
class Parent:
    """A group under which groups are made, and the controllers that work there."""

    path: Path
    version: int
    controllers: tuple[str, ...]


@dataclass(frozen=True)
class Mount:
    """A mounted hierarchy: `root` is the part of it that shows at `point`."""

    point: Path
    root: str
    version: int
    options: frozenset[str]


def mounts(mountinfo: str) -> list[Mount]:
    """The hierarchies in a text of /proc/self/mountinfo (proc(5))."""
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, *_, options) = left.split(), right.split()
        if kind in ("cgroup", "cgroup2"):
            version = 2 if kind == "cgroup2" else 1
            found.append(Mount(Path(fields[4]), fields[3], version, frozenset(options.split(","))))
    return found


def own_group(membership: str, controller: str | None) -> str:
    """This process's group, from a text of /proc/self/cgroup; None asks for the version 2 one."""
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") if controller else number == "0":
            return path
    return "/"


def version_1_parents(mountinfo: str, membership: str) -> list[Parent]:
    """For each controller of version 1, this process's own group: its limits then include ours."""
    parents: dict[Path, list[str]] = {}
    for mount in mounts(mountinfo):
        for controller in CONTROLLERS:
            old = _OLD_NAMES.get(controller, controller)
            if mount.version == 1 and old in mount.options:
                inside = os.path.relpath(own_group(membership, old), mount.root)
                shown = mount.point if inside.startswith("..") else mount.point / inside
                parents.setdefault(shown, []).append(controller)
    return [Parent(path, 1, tuple(names)) for path, names in parents.items()]


def version_2_parent(mountinfo: str, delegated: str | None = None) -> tuple[Parent | None, str]:
    """The group `delegated` of the version 2 hierarchy, without it the root, if it hands controllers down,
    and else why not.

    Not this process's own group: one with processes in it cannot have limited groups below it. At the root
    systemd takes back what none of its own units uses, as a service that ends, and limits go with it.
    """
    for mount in mounts(mountinfo):
        if mount.version != 2:
            continue
        place = mount.point / delegated.strip("/") if delegated else mount.point
        if not place.is_dir():
            place = mount.point
        offered = set((place / "cgroup.controllers").read_text().split())
        wanted = [name for name in CONTROLLERS if name in offered]
        handed_down = place / "cgroup.subtree_control"
        for name in set(wanted) - set(handed_down.read_text().split()):
            try:
                handed_down.write_text(f"+{name}")
            except OSError:
                continue  # a container's root that has processes; what is handed down may do
        usable = tuple(name for name in wanted if name in handed_down.read_text().split())
        if usable:
            return Parent(place, 2, usable), ""
        return None, f"{place} hands down none of {', '.join(CONTROLLERS)}"
    return None, "no cgroup hierarchy is mounted"


def settings(parent: Parent, limits: Limits) -> list[tuple[str, str]]:
    """Files of a group under `parent` and what to write to them."""
    quota = round(limits.cpus * _PERIOD_US)
    version_1 = {
        "cpu": [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", str(quota))],
        "memory": [("memory.limit_in_bytes", str(limits.memory_bytes))],
        "pids": [("pids.max", str(limits.tasks))],
    }
    version_2 = {
        "cpu": [("cpu.max", f"{quota} {_PERIOD_US}")],
        "memory": [("memory.max", str(limits.memory_bytes))],
        "pids": [("pids.max", str(limits.tasks))],
    }
    table = version_1 if parent.version == 1 else version_2
    # Being in a group of its own is what a process needs for its share of the disk.
    return [item for name in parent.controllers for item in table.get(name, ())]


def disk_settings(parent: Parent, device: str, limits: DiskLimits) -> list[tuple[str, str]]:
    """The same for limits of a disk, given as MAJOR:MINOR, which replace those before.

    They are for a hypervisor that does not keep its own, so they leave it room: twice the rates, or what it
    may do at once.
    """
    if "io" not in parent.controllers:
        return []
    size = _roomy(limits.bytes_per_second, limits.burst_bytes)
    count = _roomy(limits.iops, limits.burst_operations)
    if parent.version == 1:
        return [
            (f"blkio.throttle.{way}_{what}_device", f"{device} {most}")
            for what, most in (("bps", size), ("iops", count))
            for way in ("read", "write")
        ]
    rates = [("rbps", size), ("wbps", size), ("riops", count), ("wiops", count)]
    return [("io.max", " ".join([device, *(f"{name}={most or 'max'}" for name, most in rates)]))]


def _roomy(rate: int | None, burst: int | None) -> int:
    return max(2 * rate, burst or 0) if rate else 0


def device_of(path: Path) -> str | None:
    """The disk that a file or directory is on, as MAJOR:MINOR; None where it is on no disk of its own, as on
    btrfs and on a network's filesystem."""
    number = path.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not place.exists():
        return None
    whole = place.resolve().parent if (place / "partition").exists() else place  # groups know no partitions
    return (whole / "dev").read_text().strip()


class Cgroups:
    """The groups that this node may make. `missing` names controllers without effect, with the reason."""

    def __init__(self, parents: list[Parent], reason: str = "") -> None:
        self.parents = parents
        present = {name for parent in parents for name in parent.controllers}
        absent = [name for name in CONTROLLERS if name not in present]
        self.missing = f"no limits of {', '.join(absent)}: {reason}" if absent else ""

    @classmethod
    def of_host(cls, delegated: str | None = None) -> Cgroups:
        """What this host offers to this process; `delegated` as of `version_2_parent`."""
        mountinfo = Path("/proc/self/mountinfo").read_text()
        parents = version_1_parents(mountinfo, Path("/proc/self/cgroup").read_text())
        second, reason = version_2_parent(mountinfo, delegated)
        taken = {name for parent in parents for name in parent.controllers}
        if second and set(second.controllers) - taken:
            left = tuple(name for name in second.controllers if name not in taken)
            parents.append(Parent(second.path, 2, left))
        usable = [parent for parent in parents if os.access(parent.path, os.W_OK)]
        if len(usable) < len(parents):
            reason = "the groups are not writable"
        return cls(usable, reason)

    def paths(self, name: str) -> list[Path]:
        """Where the groups named `name` are or will be."""
        return [parent.path / name for parent in self.parents]

    def make(self, name: str, limits: Limits) -> None:
        """Make the groups of that name, with their limits.

        Raises:
            OSError: the kernel refused a group or a limit.
        """
        for parent in self.parents:
            group = parent.path / name
            group.mkdir()
            for file, value in settings(parent, limits):
                (group / file).write_text(value)

    def limit_disk(self, groups: list[Path], device: str, limits: DiskLimits) -> None:
        """Set limits of a disk for groups that were made here.

        Raises:
            OSError: the kernel refused one.
        """
        for group in groups:
            for parent in self.parents:
                if group.parent == parent.path:
                    for file, value in disk_settings(parent, device, limits):
                        (group / file).write_text(value)


def join(paths: list[Path], pid: int) -> None:
    """Put a process with all its threads into groups."""
    for path in paths:
        (path / "cgroup.procs").write_text(str(pid))


async def remove(path: Path) -> None:
    """Remove a group that is there no more, or whose processes are ending.

    Raises:
        OSError: processes still live in it after some seconds.
    """
    deadline = asyncio.get_running_loop().time() + _EMPTY_LIMIT_S
    pause = 0.001
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or asyncio.get_running_loop().time() > deadline:
                raise
        # The kernel lets go of a dead process's group a little after its death, and version 1
        # has no event for it.
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.1)
