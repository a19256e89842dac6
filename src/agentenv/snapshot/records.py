"""The record of a snapshot: what it consists of, and all that a restore must match.

Files are named relative to the node's data directory, so that it can be moved. What a snapshot adds
lies in `snapshots/ID/`; the layers below belong to the snapshots they came with, or to an image.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from agentenv.identity.records import DEFAULT
from agentenv.records.document import Documents

ROOT = "snapshots"

Init = Literal["agent", "systemd"]
"""What is process 1 of a guest that boots."""

Kind = Literal["template", "pause", "checkpoint", "fork", "step"]

_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
_ID_LENGTH = 19


def new_snapshot_id() -> str:
    """`s` and 19 random base32 letters (95 bits)."""
    return "s" + "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


@dataclass(frozen=True)
class StoredFile:
    """An immutable file: path relative to the data directory, length, and `sha256:HEX` once known."""

    path: str
    bytes: int
    digest: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The paths of the files it consists of; the digest is of their content in this order."""
        return (self.path,)


@dataclass(frozen=True)
class DiskLayer(StoredFile):
    """A disk layer; a qcow2 one names no backing file."""

    format: Literal["raw", "qcow2"] = "qcow2"


@dataclass(frozen=True)
class MemoryDelta(StoredFile):
    """A memory layer above a flat file, see vmm/layer.py; `bytes` is the length of its pages."""

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.path, f"{self.path}.map")


@dataclass(frozen=True)
class Memory:
    """A guest's memory: the flat file, and deltas above it, oldest first."""

    base: StoredFile
    deltas: tuple[MemoryDelta, ...] = ()


@dataclass(frozen=True)
class Fold:
    """The file `path` has the same content as the layers `replaces` together, bottom up, by their paths.

    A machine that was started from those goes on with them, and what it captures names them: by this they
    are known, and the chain on record has the one file in their place.
    """

    path: str
    replaces: tuple[str, ...]


@dataclass(frozen=True)
class Descent:
    """The template a snapshot descends from, as it was then."""

    id: str
    name: str
    build_id: str


@dataclass(frozen=True)
class Resources:
    """What the machine has; sizes in MiB."""

    vcpus: int
    memory_mib: int
    disk_mib: int


@dataclass(frozen=True)
class GuestSettings:
    """What processes in the guest start with, and what is process 1 where it boots."""

    env: dict[str, str] = field(default_factory=dict)
    default_user: str = "user"
    default_workdir: str | None = None
    init: Init = "agent"


@dataclass(frozen=True)
class Start:
    """What runs in every sandbox of a template: the command, the one that succeeds when it is up, and what
    they run with."""

    command: str = ""
    ready: str = ""
    settings: GuestSettings = field(default_factory=GuestSettings)

    def __bool__(self) -> bool:
        return bool(self.command or self.ready)


@dataclass(frozen=True)
class Attached:
    """An image that a sandbox has beside its root disk.

    `disk` are its layers, bottom up: the image alone until something of it was captured. The guest has it
    at `path`, and with `part` only that directory of it. `image` is what it was called.
    """

    id: str
    image: str
    path: str
    disk: tuple[DiskLayer, ...]
    disk_mib: int
    read_only: bool = True
    part: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """A snapshot. Times are seconds since the epoch.

    `parent` is the snapshot that its machine was started from. Without `memory` and `state` it is of
    the disk alone, and starting from it means booting. `fingerprint` holds, by what they are of, the
    values that a restore of the memory must match. `durable` tells that it was synced to the disk.
    `folds`, in the order in which they were made, are those that machines on its line may not know of.
    `drives` are in the order of their places in the machine.
    """

    id: str
    kind: Kind
    template: Descent
    resources: Resources
    disk: tuple[DiskLayer, ...]
    created_at: float
    memory: Memory | None = None
    state: StoredFile | None = None
    fingerprint: dict[str, str] = field(default_factory=dict)
    guest: GuestSettings = field(default_factory=GuestSettings)
    parent: str | None = None
    sandbox_id: str | None = None
    names: tuple[str, ...] = ()
    durable: bool = False
    expires_at: float | None = None
    deleted_at: float | None = None
    folds: tuple[Fold, ...] = ()
    drives: tuple[Attached, ...] = ()
    project: str = DEFAULT

    @property
    def disks(self) -> tuple[tuple[DiskLayer, ...], ...]:
        """The layers of the root disk, and those of each drive."""
        return (self.disk, *(drive.disk for drive in self.drives))

    def with_disks(self, disks: Iterable[tuple[DiskLayer, ...]]) -> Snapshot:
        """This with other layers of all its disks, which are in the order of `disks`."""
        disk, *others = disks
        drives = (replace(drive, disk=layers) for drive, layers in zip(self.drives, others, strict=True))
        return replace(self, disk=disk, drives=tuple(drives))

    def files(self) -> Iterator[StoredFile]:
        """All that a restore needs, its ancestors' layers included."""
        for disk in self.disks:
            yield from disk
        if self.memory is not None:
            yield self.memory.base
            yield from self.memory.deltas
        if self.state is not None:
            yield self.state

    def parts(self) -> set[str]:
        """The paths of all these files."""
        return {part for file in self.files() for part in file.parts}

    def own_files(self) -> Iterator[StoredFile]:
        """What this snapshot added."""
        return (file for file in self.files() if file.path.startswith(f"{ROOT}/{self.id}/"))

    def own_parts(self) -> set[str]:
        """The paths of those."""
        return {part for file in self.own_files() for part in file.parts}

    @property
    def added_bytes(self) -> int:
        """Bytes of the files that this snapshot added, holes counted."""
        return sum(file.bytes for file in self.own_files())


def mismatches(recorded: Mapping[str, str], present: Mapping[str, str]) -> tuple[str, ...]:
    """In what a host differs from the one a snapshot was taken on, each in words; empty when it fits."""
    return tuple(
        f"{key}: {recorded.get(key, 'nothing')} in the snapshot, {present.get(key, 'nothing')} here"
        for key in sorted(recorded.keys() | present.keys())
        if recorded.get(key) != present.get(key)
    )


_DOCUMENTS = Documents(Snapshot, "a snapshot's record")
encode = _DOCUMENTS.encode
decode = _DOCUMENTS.decode
