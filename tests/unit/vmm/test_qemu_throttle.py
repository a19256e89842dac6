"""What QEMU is told of disk limits."""

from __future__ import annotations

from agentenv.limits import DiskLimits
from agentenv.vmm.qemu.throttle import commands

NO_SPLIT = dict.fromkeys(("bps_rd", "bps_wr", "iops_rd", "iops_wr"), 0)


def test_all_disks_are_one_group() -> None:
    told = commands(DiskLimits(1000, 20, 3000, 40), 2)
    assert [name for name, *_ in told] == ["block_set_io_throttle"] * 3
    arguments = [each[1] or {} for each in told]
    assert [each.pop("id") for each in map(dict, arguments)] == ["drive-root", "drive-spare0", "drive-spare1"]
    for each in arguments:
        limits = {key: value for key, value in each.items() if key not in ("id", "group")}
        assert limits == {"bps": 1000, "iops": 20, "bps_max": 3000, "iops_max": 40, **NO_SPLIT}
        assert each["group"] == "disks"


def test_nothing_lifts_what_there_was() -> None:
    [(_, arguments, *_)] = commands(DiskLimits())
    assert arguments == {"id": "drive-root", "group": "disks", "bps": 0, "iops": 0, **NO_SPLIT}
