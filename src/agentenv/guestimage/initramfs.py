"""The initramfs: a busybox, the modules of the guest's devices, and a short init."""

from __future__ import annotations

import gzip
import ipaddress
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from agentenv.guestimage import cpio
from agentenv.guestimage.kernel import Kernel
from agentenv.guestimage.modules import Module, ModuleTree
from agentenv.guestimage.mounted import MOUNT_POINT
from agentenv.network.slot import GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_PREFIX

# Devices of a microvm machine, as modules in the order in which they load. ext4 is for kernels that
# do not build it in.
DRIVERS = ("virtio_mmio", "virtio_blk", "virtio_net")
FILESYSTEMS = ("ext4",)

# What init says before the reason when it cannot go on, after which the machine ends.
MARKER = "agentenv init:"

# fstab lines: busybox mounts a whole table in one process.
EARLY = """\
proc /proc proc nosuid,nodev,noexec 0 0
sysfs /sys sysfs nosuid,nodev,noexec 0 0
devtmpfs /dev devtmpfs mode=755 0 0
"""
LATE = """\
proc /root/proc proc nosuid,nodev,noexec 0 0
sysfs /root/sys sysfs nosuid,nodev,noexec 0 0
devtmpfs /root/dev devtmpfs mode=755,nosuid 0 0
devpts /root/dev/pts devpts gid=5,mode=620,ptmxmode=666,nosuid,noexec 0 0
tmpfs /root/dev/shm tmpfs mode=1777,nosuid,nodev 0 0
tmpfs /root/run tmpfs mode=755,nosuid,nodev 0 0
cgroup2 /root/sys/fs/cgroup cgroup2 nosuid,nodev,noexec,nsdelegate 0 0
"""

# A word of the kernel's command line that has systemd become process 1 instead of the agent.
SYSTEMD = "agentenv.init=systemd"

# The agent where systemd is process 1: early, whatever else comes up, and started again when it is killed.
# Its processes are no service's: one that runs out of memory, or an agent that starts again, ends no other.
UNIT = f"""\
[Unit]
Description=AgentENV agent
DefaultDependencies=no
RequiresMountsFor={MOUNT_POINT}
IgnoreOnIsolate=yes
RefuseManualStop=yes
StartLimitIntervalSec=0

[Service]
ExecStart=%s
Restart=always
RestartSec=0
KillMode=process
OOMPolicy=continue
OOMScoreAdjust=-1000
TasksMax=infinity
StandardOutput=file:/dev/console
StandardError=file:/dev/console
"""


def pack(kernel: Kernel, busybox: Path, command: Sequence[str]) -> bytes:
    """The archive for a kernel; `command` is what becomes process 1 on the root disk."""
    modules = needed_modules(kernel)
    entries = [cpio.directory(name) for name in ("bin", "dev", "proc", "sys", "root", "lib")]
    entries.append(cpio.character_device("dev/console", 5, 1))
    entries.append(cpio.file("bin/busybox", busybox.read_bytes(), 0o755))
    entries.append(cpio.file("early", EARLY.encode()))
    entries.append(cpio.file("late", LATE.encode()))
    entries.append(cpio.file("agentenv.service", (UNIT % shlex.join(command)).encode()))
    entries.append(cpio.file("init", init_script(modules, command).encode(), 0o755))
    entries += _module_entries(kernel.release, modules)
    return cpio.clear_of_tables(gzip.compress(cpio.archive(entries), mtime=0))


def needed_modules(kernel: Kernel) -> list[Module]:
    """The modules that a guest's devices and root disk need, in loading order."""
    if kernel.modules is None:
        return []  # a kernel that has all of it built in, or says so itself when it boots
    tree = ModuleTree(kernel.modules)
    return tree.closure([*DRIVERS, *(name for name in FILESYSTEMS if tree.has(name))])


def init_script(modules: Sequence[Module], command: Sequence[str]) -> str:
    """The init, with what it needs to know filled in."""
    network = ipaddress.ip_interface(f"{GUEST_ADDRESS}/{GUEST_PREFIX}")
    text = resources.files(__package__).joinpath("init").read_text()
    for name, value in {
        "MARKER": MARKER,
        "MODULES": " ".join(module.name for module in modules),
        "ADDRESS": GUEST_ADDRESS,
        "NETMASK": str(network.netmask),
        "GATEWAY": GATEWAY_ADDRESS,
        "SYSTEMD": SYSTEMD,
        "COMMAND": shlex.join(command),
    }.items():
        text = text.replace(f"@{name}@", value)
    return text


def _module_entries(release: str, modules: Sequence[Module]) -> list[cpio.Entry]:
    if not modules:
        return []
    place = f"lib/modules/{release}"
    lines = [f"{m.name}.ko: {' '.join(f'{needed}.ko' for needed in m.depends)}".rstrip() for m in modules]
    entries = [cpio.directory("lib/modules"), cpio.directory(place)]
    entries += [cpio.file(f"{place}/{module.name}.ko", module.data) for module in modules]
    return [*entries, cpio.file(f"{place}/modules.dep", ("\n".join(lines) + "\n").encode())]
