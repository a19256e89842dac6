"""Which control groups a host offers, from its own texts; and real ones where it has any."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agentenv.limits import DiskLimits
from agentenv.vmm import cgroup
from agentenv.vmm.cgroup import Cgroups, Limits, Parent

HYBRID = """\
22 20 0:20 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
23 22 0:21 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
24 22 0:22 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory
25 22 0:23 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
27 22 0:25 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio
26 22 0:24 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
MEMBERSHIP = "6:blkio:/disks\n5:memory:/jobs/7\n4:cpu,cpuacct:/\n3:pids:/\n0::/init.scope\n"
LIMITS = Limits(cpus=1.5, memory_bytes=512 << 20, tasks=129)


def test_version_1_controllers_are_found_below_our_own_groups() -> None:
    assert cgroup.version_1_parents(HYBRID, MEMBERSHIP) == [
        Parent(Path("/sys/fs/cgroup/cpu,cpuacct"), 1, ("cpu",)),
        Parent(Path("/sys/fs/cgroup/memory/jobs/7"), 1, ("memory",)),
        Parent(Path("/sys/fs/cgroup/pids"), 1, ("pids",)),
        Parent(Path("/sys/fs/cgroup/blkio/disks"), 1, ("io",)),
    ]


def test_a_container_sees_its_part_of_a_hierarchy() -> None:
    inside = "30 22 0:22 /docker/ab /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    (parent,) = cgroup.version_1_parents(inside, "5:memory:/docker/ab/sub\n")
    assert parent.path == Path("/sys/fs/cgroup/memory/sub")
    (parent,) = cgroup.version_1_parents(inside, "5:memory:/\n")
    assert parent.path == Path("/sys/fs/cgroup/memory")


def hierarchy(root: Path, offered: str, handed_down: str) -> str:
    (root / "cgroup.controllers").write_text(offered)
    (root / "cgroup.subtree_control").write_text(handed_down)
    return f"30 22 0:22 / {root} rw - cgroup2 cgroup2 rw\n"


def test_version_2_gives_what_it_hands_down(tmp_path: Path) -> None:
    mountinfo = hierarchy(tmp_path, "cpuset cpu io memory pids", "cpu io memory pids")
    parent, reason = cgroup.version_2_parent(mountinfo)
    assert parent == Parent(tmp_path, 2, ("cpu", "io", "memory", "pids"))
    assert reason == ""


def test_a_delegated_group_is_taken_where_it_is(tmp_path: Path) -> None:
    group = tmp_path / "system.slice/machines.service"
    group.mkdir(parents=True)
    hierarchy(group, "cpu memory pids", "cpu memory pids")
    mountinfo = hierarchy(tmp_path, "cpu io memory pids", "cpu io memory pids")
    parent, _ = cgroup.version_2_parent(mountinfo, "/system.slice/machines.service")
    assert parent == Parent(group, 2, ("cpu", "memory", "pids"))
    parent, _ = cgroup.version_2_parent(mountinfo, "/system.slice/no.service")
    assert parent is not None
    assert parent.path == tmp_path


def test_version_2_without_our_controllers_says_so(tmp_path: Path) -> None:
    parent, reason = cgroup.version_2_parent(hierarchy(tmp_path, "hugetlb", ""))
    assert parent is None
    assert str(tmp_path) in reason


def test_without_any_hierarchy_there_is_a_reason_and_no_effect(tmp_path: Path) -> None:
    parent, reason = cgroup.version_2_parent("22 20 0:20 / / rw - ext4 /dev/vda rw\n")
    assert parent is None
    none = Cgroups([], reason)
    assert none.missing == "no limits of cpu, io, memory, pids: no cgroup hierarchy is mounted"
    assert none.paths("m") == []
    none.make("m", LIMITS)


def test_what_is_written_to_a_group() -> None:
    both = ("cpu", "memory", "pids")
    assert cgroup.settings(Parent(Path("/c"), 1, both), LIMITS) == [
        ("cpu.cfs_period_us", "100000"),
        ("cpu.cfs_quota_us", "150000"),
        ("memory.limit_in_bytes", "536870912"),
        ("pids.max", "129"),
    ]
    assert cgroup.settings(Parent(Path("/c"), 2, both), LIMITS) == [
        ("cpu.max", "150000 100000"),
        ("memory.max", "536870912"),
        ("pids.max", "129"),
    ]
    assert cgroup.settings(Parent(Path("/c"), 2, ("pids",)), LIMITS) == [("pids.max", "129")]


DISK = DiskLimits(bytes_per_second=1000, iops=50, burst_bytes=5000)


def test_limits_of_a_disk_leave_the_hypervisor_room_and_can_be_lifted(tmp_path: Path) -> None:
    second = Parent(tmp_path, 2, ("io",))
    assert cgroup.disk_settings(second, "8:0", DISK) == [
        ("io.max", "8:0 rbps=5000 wbps=5000 riops=100 wiops=100")
    ]
    assert cgroup.disk_settings(Parent(tmp_path, 1, ("io",)), "8:0", DISK) == [
        ("blkio.throttle.read_bps_device", "8:0 5000"),
        ("blkio.throttle.write_bps_device", "8:0 5000"),
        ("blkio.throttle.read_iops_device", "8:0 100"),
        ("blkio.throttle.write_iops_device", "8:0 100"),
    ]
    assert cgroup.disk_settings(Parent(tmp_path, 1, ("cpu",)), "8:0", DISK) == []
    (tmp_path / "m").mkdir()
    groups = Cgroups([second])
    groups.limit_disk([tmp_path / "m", tmp_path / "others/m"], "8:0", DISK)
    groups.limit_disk([tmp_path / "m"], "8:0", DiskLimits())
    assert (tmp_path / "m/io.max").read_text() == "8:0 rbps=max wbps=max riops=max wiops=max"


def test_a_directory_is_on_a_whole_disk_or_on_none(tmp_path: Path) -> None:
    device = cgroup.device_of(tmp_path)
    if device is not None:
        assert not Path(f"/sys/dev/block/{device}/partition").exists()
    assert cgroup.device_of(Path("/proc")) is None


@pytest.fixture
def host() -> Cgroups:
    if os.geteuid() != 0:
        pytest.skip("making groups needs root")
    found = Cgroups.of_host()
    if not found.parents:
        pytest.skip(found.missing)
    return found


async def test_a_process_is_limited_and_the_group_goes_with_it(host: Cgroups, tmp_path: Path) -> None:
    name = f"aenv-test-{os.getpid()}"
    paths = host.paths(name)
    host.make(name, LIMITS)
    try:
        with subprocess.Popen(["sleep", "60"]) as child:
            cgroup.join(paths, child.pid)
            membership = Path(f"/proc/{child.pid}/cgroup").read_text()
            assert membership.count(name) == len(paths)
            for parent, path in zip(host.parents, paths, strict=True):
                for file, value in cgroup.settings(parent, LIMITS):
                    assert (path / file).read_text().strip() == value
            device = cgroup.device_of(tmp_path)
            if device and any("io" in parent.controllers for parent in host.parents):
                host.limit_disk(paths, device, DISK)
                limited = {(path / "blkio.throttle.read_bps_device") for path in paths}
                assert f"{device} 5000" in "".join(each.read_text() for each in limited if each.exists())
                host.limit_disk(paths, device, DiskLimits())
                assert device not in "".join(each.read_text() for each in limited if each.exists())
            child.kill()
    finally:
        for path in paths:
            await cgroup.remove(path)
    assert not any(path.exists() for path in paths)
    for path in paths:
        await cgroup.remove(path)  # being gone is fine
