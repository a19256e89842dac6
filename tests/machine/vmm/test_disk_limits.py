"""Limits on a machine's disks, by a real QEMU: kept to, changed, lifted, and in no snapshot."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.config import Settings
from agentenv.limits import DiskLimits
from agentenv.vmm.machine import Nic
from agentenv.vmm.qemu.command import device_id
from agentenv.vmm.qemu.machine import QemuMachine
from support import small_guest
from support.small_guest import READY, shown, small_qemu, small_spec

pytestmark = pytest.mark.machine

KIB, MIB = 1 << 10, 1 << 20
RATE = MIB
REQUEST = 4 * KIB
LAST = 32 * REQUEST  # what may be let in beyond a full bucket: QEMU makes up to 32 adjacent writes one


async def written(machine: QemuMachine, size: int, mark: str) -> float:
    """Seconds in which the guest wrote that much to its disk."""
    command = f"busybox dd if=/dev/zero of=$root bs=64k count={size // (64 * KIB)} conv=fsync"
    started = time.monotonic()
    machine.console.send(f"{command} 2>/dev/null; echo {mark}-$((1+1))\n".encode())
    await shown(machine, f"{mark}-2")
    return time.monotonic() - started


async def in_force(machine: QemuMachine) -> tuple[int, int]:
    """What QEMU says of the root disk's limits: bytes and operations per second."""
    blocks = await machine.qmp.execute("query-block")
    [root] = [block["inserted"] for block in blocks if block["qdev"].endswith(device_id())]
    return root["bps"], root["iops"]


async def test_a_disk_is_limited_and_a_snapshot_of_it_is_not(
    settings: Settings, nic: Nic, tmp_path: Path
) -> None:
    files, into = tmp_path / "files", tmp_path / "snapshot"
    files.mkdir()
    into.mkdir()
    qemu, _ = small_qemu(settings)
    spec = small_spec("limited", small_guest.guest_files(files, disks=True), nic)
    machine = await qemu.boot(spec)
    try:
        await shown(machine, READY)
        assert await in_force(machine) == (0, 0)
        machine.console.send(
            f"echo {REQUEST // KIB} >/sys/block/${{root##*/}}/queue/max_sectors_kb\n".encode()
        )
        await machine.limit_disk(DiskLimits(RATE, burst_bytes=RATE))
        assert await in_force(machine) == (RATE, 0)
        # By the bucket's own arithmetic: a second's worth goes at once, and a last write is let in.
        assert await written(machine, 3 * MIB, "SLOW") >= (3 * MIB - RATE - LAST) / RATE
        await machine.limit_disk(DiskLimits(iops=100, burst_operations=200))
        assert await in_force(machine) == (0, 100)
        await machine.limit_disk(DiskLimits())
        assert await in_force(machine) == (0, 0)
        await written(machine, 8 * MIB, "FREE")
        await machine.limit_disk(DiskLimits(RATE, 50))
        await machine.stop()
        captured = await machine.capture(into, final=True)
    finally:
        await machine.end()
    machine = await qemu.restore(replace(spec, id="again", layers=captured.layers), captured.saved)
    try:
        assert await in_force(machine) == (0, 0)
        await machine.limit_disk(DiskLimits(RATE, 50))
        await machine.run()
        assert await in_force(machine) == (RATE, 50)
    finally:
        await machine.end()
