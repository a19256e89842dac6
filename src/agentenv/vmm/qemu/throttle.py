"""A machine's disk limits as QEMU is told them (docs/throttle.txt of QEMU). No I/O.

Limits belong to a process: they are in no snapshot, and a restored machine begins without any.
"""

from __future__ import annotations

from agentenv.limits import DiskLimits
from agentenv.vmm.machine import DRIVES_MOST
from agentenv.vmm.qemu.command import device_id
from agentenv.vmm.qemu.qmp import Command

# One group, so that what the limits say holds for all disks together. The tools drive is not among them:
# it is read by the agent, and in the host's page cache.
_GROUP = "disks"
DEVICES = (device_id(), *map(device_id, range(DRIVES_MOST)))


def commands(limits: DiskLimits) -> list[Command]:
    """The commands that put these limits in force, or lift what there were."""
    rates: dict[str, object] = {
        "bps": limits.bytes_per_second or 0,
        "iops": limits.iops or 0,
        **dict.fromkeys(("bps_rd", "bps_wr", "iops_rd", "iops_wr"), 0),
    }
    if limits.burst_bytes:
        rates["bps_max"] = limits.burst_bytes
    if limits.burst_operations:
        rates["iops_max"] = limits.burst_operations
    return [("block_set_io_throttle", {"id": device, "group": _GROUP, **rates}) for device in DEVICES]
