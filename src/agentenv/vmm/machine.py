"""The machine protocol: what a sandbox needs of a hypervisor, and nothing of which one it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


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
class Nic:
    """The guest's only network device: a tap in a namespace of its own."""

    namespace: Path
    tap: str
    mac: str


@dataclass(frozen=True)
class MachineSpec:
    """A machine to be launched.

    `layers` go from the bottom up; above them the machine writes to a layer of its own, of
    `disk_mib` MiB. `uid` is the unprivileged user (and group) that the process runs as.
    """

    id: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    guest: GuestFiles
    layers: tuple[Layer, ...]
    nic: Nic
    uid: int


@dataclass(frozen=True)
class Exit:
    """How a machine's process ended. `status` is None where it cannot be known (an adopted one)."""

    reason: Literal["ended", "shutdown", "crashed"]
    status: int | None
    detail: str


class Machine(Protocol):
    """A machine that was launched or adopted. One owner at a time calls it."""

    @property
    def spec(self) -> MachineSpec: ...

    @property
    def pid(self) -> int: ...

    @property
    def exited(self) -> bool: ...

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

    async def adopt(self, spec: MachineSpec) -> Machine | None:
        """The machine of that specification if its process still runs, else None."""

    async def reap(self, keep: set[str]) -> list[str]:
        """End and release every recorded machine whose id is not in `keep`; returns their ids."""
