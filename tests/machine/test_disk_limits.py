"""Limits on a machine's disks, by a real QEMU: kept to, changed, lifted, and in no snapshot."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import audit
from agentenv.config import Settings
from agentenv.limits import DiskLimits
from agentenv.vmm.machine import Nic
from agentenv.vmm.qemu.machine import QemuMachine
from agentenv.vmm.qemu.throttle import DEVICES
from support import small_guest
from support.small_guest import READY, shown, small_qemu, small_spec

pytestmark = pytest.mark.machine

KIB, MIB = 1 << 10, 1 << 20
RATE = MIB
REQUEST = 4 * KIB
LAST = 32 * REQUEST  # what may be let in beyond a full bucket: QEMU makes up to 32 adjacent writes one


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    made = Settings(home=tmp_path / "home", runtime=Path(f"/run/aenv-t-limit-{os.getpid()}"))
    yield made
    small_guest.close_databases()
    asyncio.run(small_guest.reap(made))
    shutil.rmtree(made.runtime_dir, ignore_errors=True)


@pytest.fixture
def audit_scope(settings: Settings) -> audit.Scope:
    return audit.Scope.of(settings)


@pytest.fixture
def nic(host_audit: None) -> Iterator[Nic]:
    with small_guest.tap_namespace(f"limittest{os.getpid()}") as made:
        yield made


async def written(machine: QemuMachine, size: int, mark: str) -> float:
    """Seconds in which the guest wrote that much to its disk."""
    command = f"busybox dd if=/dev/zero of=$root bs=64k count={size // (64 * KIB)} conv=fsync"
    started = time.monotonic()
    machine.console.send(f"{command} 2>/dev/null; echo {mark}-$((1+1))\n".encode())
    await shown(machine, f"{mark}-2")
    return time.monotonic() - started


async def in_force(machine: QemuMachine) -> dict[str, Any]:
    """What QEMU says of each disk's limits."""
    blocks = await machine.qmp.execute("query-block")
    drives = {re.sub(r".*/", "", block["qdev"]): block["inserted"] for block in blocks}
    return {name: (drives[name]["bps"], drives[name]["iops"]) for name in DEVICES}


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
        assert set((await in_force(machine)).values()) == {(0, 0)}
        machine.console.send(
            f"echo {REQUEST // KIB} >/sys/block/${{root##*/}}/queue/max_sectors_kb\n".encode()
        )
        await machine.limit_disk(DiskLimits(RATE, burst_bytes=RATE))
        assert set((await in_force(machine)).values()) == {(RATE, 0)}
        # By the bucket's own arithmetic: a second's worth goes at once, and a last write is let in.
        assert await written(machine, 3 * MIB, "SLOW") >= (3 * MIB - RATE - LAST) / RATE
        await machine.limit_disk(DiskLimits(iops=100, burst_operations=200))
        assert set((await in_force(machine)).values()) == {(0, 100)}
        await machine.limit_disk(DiskLimits())
        assert set((await in_force(machine)).values()) == {(0, 0)}
        await written(machine, 8 * MIB, "FREE")
        await machine.limit_disk(DiskLimits(RATE, 50))
        await machine.stop()
        captured = await machine.capture(into, final=True)
    finally:
        await machine.end()
    machine = await qemu.restore(replace(spec, id="again", layers=captured.layers), captured.saved)
    try:
        assert set((await in_force(machine)).values()) == {(0, 0)}
        await machine.limit_disk(DiskLimits(RATE, 50))
        await machine.run()
        assert set((await in_force(machine)).values()) == {(RATE, 50)}
    finally:
        await machine.end()
