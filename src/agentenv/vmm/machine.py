"""The machine protocol: what a sandbox needs of a hypervisor, and nothing of which one it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from agentenv.errors import Conflict
from agentenv.limits import DiskLimits
from agentenv.vmm.stored import map_of


class Incompatible(Conflict):
    """A saved state that cannot be restored here: another hypervisor, processor, kernel or machine."""

    code = "incompatible"


# Devices are fixed once a machine is captured: so many places for drives are in every one, empty at first.
DRIVES_MOST = 4


def drive_serial(index: int) -> str:
    """The serial number by which the guest knows the drive in a place."""
    return f"spare{index}"


@dataclass(frozen=True)
class GuestFiles:
    """What every guest boots with, made by `aenv setup`."""

    kernel: Path
    initramfs: Path
    tools: Path


@dataclass(frozen=True)
class Layer:
    """A sealed disk layer, never written again. A qcow2 layer names no backing file."""

    path: Path
    format: Literal["raw", "qcow2"]


@dataclass(frozen=True)
class Drive:
    """A disk beside the root disk. `layers` go from the bottom up; above those of a writable one the machine
    writes to a layer of its own, of `disk_mib` MiB. The files of a read-only one are all there is of it."""

    layers: tuple[Layer, ...]
    writable: bool = False
    disk_mib: int = 0


@dataclass(frozen=True)
class Nic:
    """The guest's only network device: a tap in a namespace of its own."""

    namespace: Path
    tap: str
    mac: str


@dataclass(frozen=True)
class MachineSpec:
    """A machine to be launched.

    `layers` go from the bottom up; above them the machine writes to a layer of its own, of
    `disk_mib` MiB. `uid` is the unprivileged user (and group) that the process runs as. With `words`
    the guest's kernel is told more, when it boots. `drives` take the places that every machine has for
    them, the guest knows them by `drive_serial`.
    """

    id: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    guest: GuestFiles
    layers: tuple[Layer, ...]
    nic: Nic
    uid: int
    words: tuple[str, ...] = ()
    drives: tuple[Drive, ...] = ()


@dataclass(frozen=True)
class Exit:
    """How a machine's process ended. `status` is None where it cannot be known (an adopted one)."""

    reason: Literal["ended", "shutdown", "crashed"]
    status: int | None
    detail: str


@dataclass(frozen=True)
class MemoryImage:
    """A guest's whole memory: a flat file, and deltas above it, oldest first (`agentenv.vmm.memory`)."""

    base: Path
    deltas: tuple[Path, ...] = ()

    def files(self) -> tuple[Path, ...]:
        """All its files, the maps of the deltas among them."""
        return (self.base, *(file for delta in self.deltas for file in (delta, map_of(delta))))


@dataclass(frozen=True)
class SavedState:
    """What a machine is restored from, besides its disk layers."""

    device_state: Path
    memory: MemoryImage


@dataclass(frozen=True)
class Capture:
    """What a capture wrote.

    `memory` holds `pages` pages: a delta, or the flat file of a booted machine. `disk` is the layer
    sealed now. `image` and `layers` are the whole of it, bottom up, to restore from: they begin with
    what the machine was launched with, go on with what earlier captures of it gave, and end with
    `memory` and `disk`. Where files of an earlier capture are gone by now, `layers` has them anew, as
    further files of this one, and `image` leaves them out. `drives` has the layers of each drive in the same
    way, a layer sealed now at the top of each writable one. `seconds` are by phase.
    """

    device_state: Path
    memory: Path
    pages: int
    disk: Layer
    image: MemoryImage
    layers: tuple[Layer, ...]
    drives: tuple[tuple[Layer, ...], ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def saved(self) -> SavedState:
        """What to restore from, with a specification that has `layers`."""
        return SavedState(self.device_state, self.image)


class Machine(Protocol):
    """A machine that was launched or adopted. One owner at a time calls it."""

    @property
    def spec(self) -> MachineSpec: ...

    @property
    def pid(self) -> int: ...

    @property
    def exited(self) -> bool: ...

    @property
    def stands_on(self) -> frozenset[Path]:
        """The files outside of its own directory that it needs until it ends: what it runs from, and what
        its captures build upon."""

    async def run(self) -> None:
        """Let the vcpus run: after a restore, after `stop`, and after the hypervisor stopped them by
        itself and the cause is gone. No effect on a machine that runs.

        Raises:
            Conflict: a final capture that still exists shares its files.
            HostFault: the machine is gone.
        """

    async def stop(self) -> None:
        """Stop the vcpus; returns when they and all disk requests rest. Repeatable.

        Raises:
            HostFault: the machine is gone.
        """

    async def capture(self, into: Path, *, final: bool) -> Capture:
        """Write the state of a stopped machine to a directory: `state`, `memory` (with a map when it is
        a delta), `disk`, and `drive0` and so on for the writable drives. The machine stays stopped.

        With `final` it is about to be ended, and `run` is refused from then on unless what was
        captured is removed; without, the disk goes on in a new layer. `into` exists, is empty, and
        should be on the filesystem of the machines' directory, or files are copied instead of linked.

        Nothing is synced. On failure nothing of it is left in `into`, and a machine that has not died
        of it can go on with `run`.

        Raises:
            Conflict: the machine runs. StoreFull, StoreFault: the files cannot be written.
            StoreCorrupt: the flat memory file that the machine came from cannot be read any more.
            HostFault: the machine is gone, or the hypervisor refused.
        """

    async def limit_disk(self, limits: DiskLimits) -> None:
        """Have all disks together no faster than that from now on, in the place of earlier limits. A machine
        that was just launched has none.

        Raises:
            HostFault: the machine is gone.
        """

    async def wait(self) -> Exit:
        """Return when the process is gone, for whatever reason; any number of callers may wait."""

    async def end(self) -> None:
        """Kill the process if it runs and release all that the launch made. Repeatable."""

    def detach(self) -> None:
        """Let go of the machine without touching it: it outlives this process."""

    def console_tail(self) -> str:
        """The end of what the guest wrote to its console, at most 2 KiB; empty when there is none."""

    def on_event(self, callback: Callable[[str, dict[str, object]], None]) -> None:
        """Be told of what the hypervisor reports by itself: a stop, a block I/O error, a reset."""


class Hypervisor(Protocol):
    """Launches machines and finds those of an earlier life of this node."""

    @property
    def name(self) -> str: ...

    async def boot(self, spec: MachineSpec) -> Machine:
        """Start a machine cold. Returns once the process runs; the guest boots from then on.

        On failure nothing of the launch is left.
        """

    async def restore(
        self, spec: MachineSpec, saved: SavedState, *, fingerprint: Mapping[str, str] | None = None
    ) -> Machine:
        """A machine with that state, whose vcpus do not run yet: `run` starts them.

        `spec.layers` are the disk at the moment of the capture. The root disk may be larger than
        there: the guest sees it grow. Of the drives the first are those of the capture, more may follow:
        the guest sees them when its driver looks at the device anew. `fingerprint` is the one recorded with
        the capture.

        On failure nothing of the launch is left.

        Raises:
            Incompatible: this host, hypervisor or specification is not the capture's.
            StoreCorrupt: a file of it is damaged or missing.
        """

    async def fingerprint(self, spec: MachineSpec) -> dict[str, str]:
        """All that must be the same where a capture of this machine is restored."""

    async def adopt(self, spec: MachineSpec) -> Machine | None:
        """The machine of that specification if its process still runs, else None.

        It runs from then on. A restored one that had not begun to run is ended instead.
        """

    async def reap(self, keep: set[str]) -> list[str]:
        """End and release every recorded machine whose id is not in `keep`; returns their ids."""
