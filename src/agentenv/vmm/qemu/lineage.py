"""What a machine's memory and disk consist of: what it was launched with, and what captures added.

Each layer that a machine has written lies in its own directory for as long as the machine exists, so
whatever becomes of a capture's files, the next one can be made. A note of it in the ledger lets an
adopted machine's captures go on from the last one; without the note they would only be larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentenv.vmm.machine import Layer, MachineSpec, MemoryImage
from agentenv.vmm.qemu.command import device_id, live_node


@dataclass(frozen=True)
class Disk:
    """A disk that a machine writes to: its root disk, or one of its drives.

    Args:
        directory: the machine's own.
        layers: what it was launched with.
        sealed: where captures put the layers that it has written and sealed since, bottom up.
        drive: which drive it is.
    """

    directory: Path
    layers: tuple[Layer, ...]
    sealed: tuple[Path, ...] = ()
    drive: int | None = None

    @property
    def depth(self) -> int:
        """Layers below the one that is written."""
        return len(self.layers) + len(self.sealed)

    @property
    def name(self) -> str:
        """What a capture calls its layer."""
        return "disk" if self.drive is None else f"drive{self.drive}"

    @property
    def device(self) -> str:
        """The device whose block node is written to."""
        return device_id(self.drive)

    def node(self, above: int = 0) -> str:
        """The block node that is written, or comes so many captures later."""
        return live_node(self.depth + above, self.drive)

    def file(self, above: int = 0) -> Path:
        """That layer's file."""
        return disk_file(self.directory, self.depth + above, self.drive)

    def own(self) -> tuple[tuple[Path, Path], ...]:
        """The machine's own files of the layers that it has sealed, each with where a capture put it."""
        first = len(self.layers)
        return tuple(
            (disk_file(self.directory, first + index, self.drive), path)
            for index, path in enumerate(self.sealed)
        )

    def up_to(self, node: str) -> Disk:
        """This disk where it writes to that block node: it may have sealed a layer that was never noted.

        Raises:
            ValueError: it is no layer of its own.
        """
        sealed: list[Path] = []
        found = replace(self, sealed=())
        while found.node() != node:
            own = found.file()
            if not own.exists():
                raise ValueError(f"it writes to {node}, which is no layer of its own")
            sealed.append(self.sealed[len(sealed)] if len(sealed) < len(self.sealed) else own)
            found = replace(self, sealed=tuple(sealed))
        return found


def disks_of(directory: Path, spec: MachineSpec) -> tuple[Disk, ...]:
    """The disks that a machine of a specification begins to write to: the root disk first."""
    drives = (
        Disk(directory, drive.layers, drive=index)
        for index, drive in enumerate(spec.drives)
        if drive.writable
    )
    return (Disk(directory, spec.layers), *drives)


@dataclass(frozen=True)
class Lineage:
    """Of one machine, now.

    Args:
        directory: the machine's own.
        layers: what it was launched with.
        sealed: where captures put the layers that it has written and sealed since, bottom up.
        image: the memory it was restored from and the deltas captured since; None when it was booted.
        ran: whether its vcpus ever began to run.
        drives: the drives that it writes to.
    """

    directory: Path
    layers: tuple[Layer, ...]
    sealed: tuple[Path, ...] = ()
    image: MemoryImage | None = None
    ran: bool = False
    drives: tuple[Disk, ...] = ()

    @property
    def disks(self) -> tuple[Disk, ...]:
        """All that it writes to, the root disk first."""
        return (Disk(self.directory, self.layers, self.sealed), *self.drives)

    def with_disks(self, disks: Sequence[Disk], **changes: Any) -> Lineage:
        """This with other states of its disks."""
        root, *drives = disks
        return replace(self, sealed=root.sealed, drives=tuple(drives), **changes)

    @property
    def depth(self) -> int:
        """Layers below the one of the root disk that is written."""
        return self.disks[0].depth

    @property
    def disk(self) -> Path:
        """The layer of the root disk that is written."""
        return self.disks[0].file()

    @property
    def memory(self) -> Path:
        """A booted machine's memory."""
        return memory_file(self.directory)

    @property
    def stands_on(self) -> frozenset[Path]:
        """All files that it consists of and that are not in its own directory."""
        image = self.image.files() if self.image else ()
        layers = (layer.path for disk in self.disks for layer in disk.layers)
        sealed = (path for disk in self.disks for path in disk.sealed)
        files = (*layers, *sealed, *image)
        return frozenset(path for path in files if not path.is_relative_to(self.directory))

    def shared(self) -> bool:
        """Whether the files that the guest writes are a capture's as well."""
        disks = [disk.file() for disk in self.disks]
        written = disks if self.image else [*disks, self.memory]
        return any(path.exists() and path.stat().st_nlink > 1 for path in written)

    def detail(self) -> dict[str, Any]:
        """As it is noted in the ledger."""
        image = self.image and [str(path) for path in (self.image.base, *self.image.deltas)]
        noted = {disk.name: [str(path) for path in disk.sealed] for disk in self.drives}
        return {
            "image": image,
            "sealed": [str(path) for path in self.sealed],
            "ran": self.ran,
            **({"drives": noted} if noted else {}),
        }

    @classmethod
    def noted(
        cls, directory: Path, spec: MachineSpec, detail: Mapping[str, Any], nodes: Sequence[str]
    ) -> Lineage:
        """That of a machine of an earlier life of this node, from the note and the block nodes that its disks
        (see `disks_of`) are written to.

        Raises:
            ValueError: one is no layer of its own.
        """
        image = [Path(path) for path in detail.get("image") or ()]
        known = {"disk": detail.get("sealed", ()), **detail.get("drives", {})}
        root, *drives = (
            replace(disk, sealed=tuple(map(Path, known.get(disk.name, ())))).up_to(node)
            for disk, node in zip(disks_of(directory, spec), nodes, strict=True)
        )
        return cls(
            directory,
            spec.layers,
            root.sealed,
            MemoryImage(image[0], tuple(image[1:])) if image else None,
            detail.get("ran", True),
            tuple(drives),
        )


def disk_file(directory: Path, depth: int, drive: int | None = None) -> Path:
    """A machine's own layer that lies upon `depth` others."""
    return directory / f"{live_node(depth, drive)}.qcow2"


def memory_file(directory: Path) -> Path:
    """The memory of a machine that was booted."""
    return directory / "memory"
