"""A guest that boots in seconds: the prepared kernel and an initramfs that is only a shell."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from agentenv import config
from agentenv.config import Settings
from agentenv.guestimage import build, cpio
from agentenv.guestimage.modules import ModuleTree
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.vmm.machine import GuestFiles, MachineSpec, Nic
from agentenv.vmm.qemu.hypervisor import Qemu
from agentenv.vmm.qemu.machine import QemuMachine
from agentenv.vmm.qemu.steps import Trace

READY = "SMALL-GUEST-READY"
TSC_KHZ = 2_000_000  # the guest's clock may be wrong here
UID = 1_987_654_321

_opened: list[Database] = []

_INIT = """#!/bin/busybox sh
busybox mount -t proc proc /proc
busybox mount -t devtmpfs dev /dev
busybox mount -t sysfs sys /sys
%s
echo %s
while read -r line; do eval "$line"; done
"""

# With disks: `$root` is the root disk's device.
_DISKS = """\
for name in %s; do busybox insmod /$name.ko; done
for disk in /sys/block/vd*; do
  case $(busybox cat $disk/serial) in root) root=/dev/${disk##*/} ;; esac
done
"""
_DRIVERS = ("virtio_mmio", "virtio_blk")


def guest_files(directory: Path, *, disks: bool = False) -> GuestFiles:
    """The files of such a guest, written to a directory; with `disks` it finds its root disk."""
    kernel = build.load(config.load()).kernel
    busybox = next(kernel.resolve().parent.parent.glob("busybox-*"))
    modules = ModuleTree(kernel.resolve().parent / "modules").closure(_DRIVERS) if disks else []
    early = _DISKS % " ".join(module.name for module in modules) if disks else ""
    entries = [
        *(cpio.directory(name) for name in ("bin", "dev", "proc", "sys")),
        cpio.file("bin/busybox", busybox.read_bytes(), 0o755),
        cpio.link("bin/sh", "busybox"),
        cpio.character_device("dev/console", 5, 1),
        cpio.file("init", (_INIT % (early, READY)).encode(), 0o755),
        *(cpio.file(f"{module.name}.ko", module.data) for module in modules),
    ]
    initramfs, tools = directory / "initramfs", directory / "tools"
    initramfs.write_bytes(cpio.archive(entries))
    tools.write_bytes(bytes(1 << 20))
    return GuestFiles(kernel, initramfs, tools)


@contextlib.contextmanager
def tap_namespace(name: str) -> Iterator[Nic]:
    """A network namespace that holds nothing but a tap."""
    run = ["ip", "-n", name]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(
            [*run, "tuntap", "add", "tap0", "mode", "tap", "user", str(UID), "vnet_hdr"], check=True
        )
        yield Nic(Path("/run/netns") / name, "tap0", "02:fc:00:00:00:05")
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def small_spec(machine_id: str, guest: GuestFiles, nic: Nic) -> MachineSpec:
    """A machine of one vcpu and little memory without an image."""
    return MachineSpec(machine_id, 1, 128, 256, guest, (), nic, UID)


def small_qemu(settings: Settings, trace: Trace | None = None) -> tuple[Qemu, Ledger]:
    """A hypervisor on a data directory, with its ledger."""
    database = Database(settings.database)
    _opened.append(database)
    ledger = Ledger(database)
    return Qemu(settings, ledger, accelerator="tcg", tsc_khz=TSC_KHZ, trace=trace), ledger


def close_databases() -> None:
    """Close what `small_qemu` opened."""
    while _opened:
        _opened.pop().close()


async def reap(settings: Settings) -> None:
    """End all machines of a data directory."""
    if settings.database.exists():
        await small_qemu(settings)[0].reap(set())
        close_databases()


async def shown(machine: QemuMachine, text: str, limit_s: float = 60.0) -> str:
    """Return what the console shows once `text` is in it."""
    async with asyncio.timeout(limit_s):
        while text not in (seen := machine.console.tail(65536)):
            if machine.exited:
                raise AssertionError(f"the machine ended: {await machine.wait()}\n{seen}")
            await asyncio.sleep(0.02)  # the console has no event for a test to await
    return seen
