"""The command line of a machine's QEMU: decided here from a specification, nothing is done.

Every file is handed over as a descriptor that the node opened: the machine's user need not be able to
reach the data directory. Why each switch is there is said beside it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from agentenv.vmm.machine import MachineSpec

Accelerator = Literal["kvm", "tcg"]

# Devices are fixed once a template is captured; drives of size zero stand in for images that are
# attached later.
PLACEHOLDERS = 4


@dataclass(frozen=True)
class Descriptors:
    """Numbers of the open files that a machine's process inherits.

    `disk` is the machine's own layer, opened for writing and a second time for reading: when a
    snapshot seals the layer, QEMU goes on with the second one. `kvm` is /dev/kvm where it is used,
    which the machine's user mostly may not open.
    """

    kernel: int
    initramfs: int
    memory: int
    tools: int
    layers: tuple[int, ...]
    disk: tuple[int, int]
    tap: int
    qmp: int
    console: int
    kvm: int | None = None

    def all(self) -> tuple[int, ...]:
        """Every number."""
        several = (*self.layers, *self.disk)
        single = (self.kernel, self.initramfs, self.memory, self.tools, self.tap, self.qmp, self.console)
        return (*single, *several, *(() if self.kvm is None else (self.kvm,)))


@dataclass(frozen=True)
class Emulation:
    """How the guest's code runs. `tsc_khz` is the host's TSC rate, `buffer_mib` the translation buffer
    under software emulation."""

    accelerator: Accelerator
    tsc_khz: int
    buffer_mib: int


def kernel_command_line(emulation: Emulation) -> str:
    """What the guest's kernel is told."""
    words = [
        "console=ttyS0",
        "quiet",  # each byte on an emulated serial port costs time
        "panic=-1",
        "reboot=t",  # with -no-reboot, a panic or reboot ends the process
        "mitigations=off",  # one guest is one security domain
        "cryptomgr.notests=1",  # checking every cipher at each boot takes a second under emulation
        "net.ifnames=0",  # the interface keeps the name that the initramfs gives an address to
    ]
    if emulation.accelerator == "tcg":
        # Calibrating against an emulated timer fails on a busy host, and the boot then hangs.
        words.append(f"tsc_early_khz={emulation.tsc_khz}")
        # Nor may it be judged against one later: on a busy host the TSC would be given up for jiffies.
        words.append("tsc=reliable")
    return " ".join(words)


def boot_command(
    program: str, spec: MachineSpec, descriptors: Descriptors, emulation: Emulation
) -> list[str]:
    """Program and arguments for a cold boot; the vcpus wait for `cont`."""
    return [
        program,
        *("-name", spec.id),
        *_machine(spec, descriptors, emulation),
        *_memory(spec, descriptors.memory),
        *("-kernel", f"/proc/self/fd/{descriptors.kernel}"),
        *("-initrd", f"/proc/self/fd/{descriptors.initramfs}"),
        *("-append", kernel_command_line(emulation)),
        *_disks(spec, descriptors),
        *_network(spec, descriptors.tap),
        *_sockets(descriptors),
        # System calls that a hypervisor at work does not need are denied to it.
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        "-S",
    ]


def _machine(spec: MachineSpec, descriptors: Descriptors, emulation: Emulation) -> list[str]:
    arguments = [
        # A device state stream written outside of a migration has no configuration section.
        *("-global", "migration.send-configuration=off"),
        # suppress-vmdesc: such a stream has no description section either. What a guest keeps in its
        # memory is not written to the host's disk when QEMU crashes.
        *("-machine", "microvm,acpi=on,memory-backend=memory,suppress-vmdesc=on,dump-guest-core=off"),
        *("-smp", str(spec.vcpus)),
        *("-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none"),
    ]
    if emulation.accelerator == "tcg":
        return [*arguments, "-accel", f"tcg,tb-size={emulation.buffer_mib}", "-cpu", "max"]
    assert descriptors.kvm is not None
    device = _set_of(descriptors.kvm)
    return [*arguments, *_passed(descriptors.kvm), "-accel", f"kvm,device={device}", "-cpu", "host"]


def _memory(spec: MachineSpec, descriptor: int) -> list[str]:
    # A shared mapping of a file: when the machine is captured, the file is the memory layer.
    backend = f"memory-backend-file,id=memory,size={spec.memory_mib}M,share=on"
    return ["-m", f"{spec.memory_mib}M", "-object", f"{backend},mem-path=/proc/self/fd/{descriptor}"]


def _disks(spec: MachineSpec, descriptors: Descriptors) -> list[str]:
    arguments: list[str] = []
    below: str | None = None
    for index, (layer, descriptor) in enumerate(zip(spec.layers, descriptors.layers, strict=True)):
        node: dict[str, object] = {"driver": layer.format, "node-name": f"layer{index}", "read-only": True}
        if layer.format == "qcow2":
            node["backing"] = below
        arguments += [*_passed(descriptor), *_block(node, _file(descriptor))]
        below = f"layer{index}"
    arguments += _passed(*descriptors.disk)
    own: dict[str, object] = {
        "driver": "qcow2",
        "node-name": f"layer{len(spec.layers)}",
        "backing": below,
        "discard": "unmap",
        # What the death of the host may lose is a running sandbox; a captured layer is synced.
        "cache": {"no-flush": True},
    }
    arguments += _block(own, {**_file(descriptors.disk[0]), "discard": "unmap", "cache": {"no-flush": True}})
    arguments += _drive(f"layer{len(spec.layers)}", "root")
    tools: dict[str, object] = {"driver": "raw", "node-name": "tools", "read-only": True}
    arguments += [*_passed(descriptors.tools), *_block(tools, _file(descriptors.tools))]
    arguments += _drive("tools", "tools")
    for index in range(PLACEHOLDERS):
        spare = {"driver": "null-co", "node-name": f"spare{index}", "size": 0, "read-zeroes": True}
        arguments += ["-blockdev", json.dumps(spare), *_drive(f"spare{index}", f"spare{index}")]
    return arguments


def _network(spec: MachineSpec, tap: int) -> list[str]:
    return [
        *("-netdev", f"tap,id=network,fd={tap}"),
        *("-device", f"virtio-net-device,netdev=network,mac={spec.nic.mac}"),
    ]


def _sockets(descriptors: Descriptors) -> list[str]:
    # Listening sockets that the node made: it can connect at once, and again after its own restart.
    # Console output is dropped while nobody is connected, so the guest never waits for a reader.
    return [
        *("-chardev", f"socket,id=qmp,fd={descriptors.qmp},server=on,wait=off"),
        *("-mon", "chardev=qmp,mode=control"),
        *("-chardev", f"socket,id=console,fd={descriptors.console},server=on,wait=off"),
        *("-serial", "chardev:console"),
    ]


def _block(node: dict[str, object], file: dict[str, object]) -> list[str]:
    return ["-blockdev", json.dumps({**node, "file": file})]


def _drive(node: str, serial: str) -> list[str]:
    # Guests find a disk by its serial: the order of the devices is not the order of their letters.
    return ["-device", f"virtio-blk-device,drive={node},serial={serial},id=drive-{serial}"]


def _file(descriptor: int) -> dict[str, object]:
    return {"driver": "file", "filename": _set_of(descriptor)}


def _passed(descriptor: int, *alternatives: int) -> list[str]:
    """The option that makes a set of descriptors, of which QEMU takes the one whose mode fits."""
    arguments: list[str] = []
    for one in (descriptor, *alternatives):
        arguments += ["-add-fd", f"fd={one},set={descriptor}"]
    return arguments


def _set_of(descriptor: int) -> str:
    return f"/dev/fdset/{descriptor}"
