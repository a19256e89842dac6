"""The command line of a machine's QEMU: decided here from a specification, nothing is done.

Every file is handed over by the node, which opened it: the machine's process sees no directory of the
host's. Why each switch is there is said beside it.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, replace
from typing import Literal

from agentenv.vmm.machine import DRIVES_MOST, Layer, MachineSpec, drive_serial
from agentenv.vmm.view import Given, place_of

Accelerator = Literal["kvm", "tcg"]


@dataclass(frozen=True)
class DriveFiles:
    """Numbers of the open files of a drive: its layers', and of its own layer if it is written to."""

    layers: tuple[int, ...]
    disk: tuple[int, int] | None = None

    def all(self) -> tuple[int, ...]:
        """Every number."""
        return (*self.layers, *(self.disk or ()))


@dataclass(frozen=True)
class Descriptors:
    """Numbers of the open files that a machine's process inherits.

    Not inherited but seen by its process at a place of their own (`view`) are those that QEMU opens by name:
    `memory`, `kernel` and `initramfs`.

    `disk` is the machine's own layer, opened for writing and a second time for reading: when a
    snapshot seals the layer, QEMU goes on with the second one. `kvm` is /dev/kvm where it is used,
    which the machine's user mostly may not open. A machine that is restored has a device `state`, and
    needs neither kernel nor initramfs: they are in its memory.
    """

    memory: int
    tools: int
    layers: tuple[int, ...]
    disk: tuple[int, int]
    tap: int
    qmp: int
    console: int
    kernel: int | None = None
    initramfs: int | None = None
    state: int | None = None
    kvm: int | None = None
    drives: tuple[DriveFiles, ...] = ()

    def all(self) -> tuple[int, ...]:
        """Every number that is inherited."""
        given = (self.tools, *self.layers, *self.disk, self.tap, self.qmp, self.console)
        optional = (self.state, self.kvm)
        drives = (number for drive in self.drives for number in drive.all())
        return (*given, *(number for number in optional if number is not None), *drives)

    def seen(self) -> dict[Given, int]:
        """The files that are opened by name."""
        named: dict[Given, int | None] = {
            "memory": self.memory,
            "kernel": self.kernel,
            "initramfs": self.initramfs,
        }
        return {name: number for name, number in named.items() if number is not None}


_NUMBERS = Descriptors(memory=0, tools=0, layers=(), disk=(0, 0), tap=0, qmp=0, console=0)


# Code that does not fit is translated again and again: the first lines of Bash and TypeScript in the code
# interpreter, whose kernels start for them, took twice as long with 32 MiB as with 256.
_BUFFER_LEAST_MIB = 32
_BUFFER_SHARE = 8


@dataclass(frozen=True)
class Emulation:
    """How the guest's code runs. `tsc_khz` is the host's TSC rate, `buffer_mib` bounds the translation buffer
    under software emulation; without it, the guest's memory does."""

    accelerator: Accelerator
    tsc_khz: int
    buffer_mib: int | None = None

    def buffer_of(self, memory_mib: int) -> int:
        """MiB for the translations of a machine with that much memory."""
        if self.accelerator == "kvm":
            return 0
        return self.buffer_mib or max(memory_mib // _BUFFER_SHARE, _BUFFER_LEAST_MIB)


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
    kernel = [
        *("-kernel", place_of("kernel")),
        *("-initrd", place_of("initramfs")),
        *("-append", " ".join((kernel_command_line(emulation), *spec.words))),
    ]
    # A shared mapping of a file: when the machine is captured, the file is the memory layer.
    return [*_common(program, spec, descriptors, emulation, "share=on"), *kernel]


def restore_command(
    program: str, spec: MachineSpec, descriptors: Descriptors, emulation: Emulation
) -> list[str]:
    """The same for a machine whose device state is loaded with `migrate-incoming` from `state_of`.

    Without the kernel: a process would keep tens of MiB of its image and never look at them.
    """
    assert descriptors.state is not None
    # A private mapping: clean pages are shared by all through the page cache. rom=off lets the guest
    # write to its copies of a file that QEMU itself may not write.
    memory = "share=off,readonly=on,rom=off"
    common = _common(program, spec, descriptors, emulation, memory)
    return [*common, *_passed(descriptors.state), "-incoming", "defer"]


def state_of(descriptors: Descriptors) -> str:
    """Where a machine that is restored finds its device state (a migration address)."""
    assert descriptors.state is not None
    return f"file:{_set_of(descriptors.state)}"


def live_node(layers: int, drive: int | None = None) -> str:
    """The block node that a machine writes to above so many sealed layers, of its root disk or of a drive;
    also its file's stem."""
    return f"layer{layers}" if drive is None else f"drive{drive}layer{layers}"


def device_id(drive: int | None = None) -> str:
    """The device of the root disk or of a drive, as QEMU calls it."""
    return f"drive-{'root' if drive is None else drive_serial(drive)}"


def overlay_node(node: str, fdset: int) -> dict[str, object]:
    """The block node of the layer that a running machine is to write next, not yet above another."""
    return _own_layer(node, None, f"/dev/fdset/{fdset}")


def devices(spec: MachineSpec) -> list[str]:
    """All of the machine but its files, in words that are the same for every restore of it."""
    argv = _common("", replace(spec, layers=(), drives=()), _NUMBERS, Emulation("tcg", 0), "")
    values = [value for name, value in itertools.pairwise(argv) if name in ("-device", "-machine")]
    return [re.sub(r"mac=[0-9a-f:]+", "mac=", value) for value in values]


def cpu(accelerator: Accelerator) -> str:
    """The processor that the guest sees, as QEMU calls it.

    Without ERMS and FSRM the guest's kernel does not copy with `rep movsb`, which the emulator carries
    out byte by byte: 20 MB through a pipe took 3.4 s with them and 1.2 s without.
    """
    return "host" if accelerator == "kvm" else "max,erms=off,fsrm=off"


def _common(
    program: str, spec: MachineSpec, descriptors: Descriptors, emulation: Emulation, memory: str
) -> list[str]:
    return [
        program,
        *("-name", spec.id),
        *_machine(spec, descriptors, emulation),
        *_memory(spec, memory),
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
        # The network need not be told where a restored machine is now.
        *("-global", "migration.announce-rounds=0"),
        # suppress-vmdesc: such a stream has no description section either. What a guest keeps in its
        # memory is not written to the host's disk when QEMU crashes.
        *("-machine", "microvm,acpi=on,memory-backend=memory,suppress-vmdesc=on,dump-guest-core=off"),
        *("-smp", str(spec.vcpus)),
        *("-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none"),
    ]
    if emulation.accelerator == "tcg":
        buffer_mib = emulation.buffer_of(spec.memory_mib)
        return [*arguments, "-accel", f"tcg,tb-size={buffer_mib}", "-cpu", cpu("tcg")]
    assert descriptors.kvm is not None
    device = _set_of(descriptors.kvm)
    return [*arguments, *_passed(descriptors.kvm), "-accel", f"kvm,device={device}", "-cpu", cpu("kvm")]


def _memory(spec: MachineSpec, how: str) -> list[str]:
    backend = f"memory-backend-file,id=memory,size={spec.memory_mib}M,{how}"
    return ["-m", f"{spec.memory_mib}M", "-object", f"{backend},mem-path={place_of('memory')}"]


def _disks(spec: MachineSpec, descriptors: Descriptors) -> list[str]:
    arguments, root = _stack(spec.layers, descriptors.layers, descriptors.disk)
    arguments += _drive(root, "root")
    tools: dict[str, object] = {"driver": "raw", "node-name": "tools", "read-only": True}
    arguments += [*_passed(descriptors.tools), *_block(tools, _file(descriptors.tools))]
    arguments += _drive("tools", "tools")
    for index in range(DRIVES_MOST):
        if index < len(spec.drives):
            files = descriptors.drives[index]
            nodes, node = _stack(spec.drives[index].layers, files.layers, files.disk, index)
        else:  # of no size: it stands in for what is attached later
            node = drive_serial(index)
            spare = {"driver": "null-co", "node-name": node, "size": 0, "read-zeroes": True}
            nodes = ["-blockdev", json.dumps(spare)]
        arguments += [*nodes, *_drive(node, drive_serial(index))]
    return arguments


def _stack(
    layers: tuple[Layer, ...],
    opened: tuple[int, ...],
    disk: tuple[int, int] | None,
    drive: int | None = None,
) -> tuple[list[str], str]:
    """The block nodes of sealed layers and of the machine's own above them, and the name of the topmost."""
    arguments: list[str] = []
    below: str | None = None
    for index, (layer, descriptor) in enumerate(zip(layers, opened, strict=True)):
        name = live_node(index, drive)
        node: dict[str, object] = {"driver": layer.format, "node-name": name, "read-only": True}
        if layer.format == "qcow2":
            node["backing"] = below
        arguments += [*_passed(descriptor), *_block(node, _file(descriptor))]
        below = name
    if disk is None:
        assert below is not None, "a disk that is not written to has layers"
        return arguments, below
    name = live_node(len(layers), drive)
    own = _own_layer(name, below, _set_of(disk[0]))
    return [*arguments, *_passed(*disk), "-blockdev", json.dumps(own)], name


def _own_layer(name: str, below: str | None, file: str) -> dict[str, object]:
    # What the death of the host may lose is a running sandbox; a captured layer is synced.
    kept = {"discard": "unmap", "cache": {"no-flush": True}}
    return {
        "driver": "qcow2",
        "node-name": name,
        "backing": below,
        "file": {"driver": "file", "filename": file, "locking": "off", **kept},
        **kept,
    }


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
    # Which machine opens what is the node's to decide: a lock would only be in the way when a layer is
    # used by others while the machine that wrote it is not quite gone.
    return {"driver": "file", "filename": _set_of(descriptor), "locking": "off"}


def _passed(descriptor: int, *alternatives: int) -> list[str]:
    """The option that makes a set of descriptors, of which QEMU takes the one whose mode fits."""
    arguments: list[str] = []
    for one in (descriptor, *alternatives):
        arguments += ["-add-fd", f"fd={one},set={descriptor}"]
    return arguments


def _set_of(descriptor: int) -> str:
    return f"/dev/fdset/{descriptor}"
