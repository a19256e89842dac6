"""What a machine's memory and disk consist of: what it was launched with, and what captures added.

Each layer that a machine has written lies in its own directory for as long as the machine exists, so
whatever becomes of a capture's files, the next one can be made. A note of it in the ledger lets an
adopted machine's captures go on from the last one; without the note they would only be larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.vmm.machine import Layer, MachineSpec, MemoryImage
from agentenv.vmm.qemu.command import live_node


@dataclass(frozen=True)
class Lineage:
    """Of one machine, now.

    Args:
        directory: the machine's own.
        layers: what it was launched with.
        sealed: where captures put the layers that it has written and sealed since, bottom up.
        image: the memory it was restored from and the deltas captured since; None when it was booted.
        ran: whether its vcpus ever began to run.
    """

    directory: Path
    layers: tuple[Layer, ...]
    sealed: tuple[Path, ...] = ()
    image: MemoryImage | None = None
    ran: bool = False

    @property
    def depth(self) -> int:
        """Layers below the one that is written."""
        return len(self.layers) + len(self.sealed)

    @property
    def disk(self) -> Path:
        """The layer that is written."""
        return disk_file(self.directory, self.depth)

    @property
    def memory(self) -> Path:
        """A booted machine's memory."""
        return memory_file(self.directory)

    @property
    def stands_on(self) -> frozenset[Path]:
        """All files that it consists of and that are not in its own directory."""
        image = self.image.files() if self.image else ()
        files = (*(layer.path for layer in self.layers), *self.sealed, *image)
        return frozenset(path for path in files if not path.is_relative_to(self.directory))

    def shared(self) -> bool:
        """Whether the files that the guest writes are a capture's as well."""
        written = [self.disk] if self.image else [self.disk, self.memory]
        return any(path.exists() and path.stat().st_nlink > 1 for path in written)

    def detail(self) -> dict[str, Any]:
        """As it is noted in the ledger."""
        image = self.image and [str(path) for path in (self.image.base, *self.image.deltas)]
        return {"image": image, "sealed": [str(path) for path in self.sealed], "ran": self.ran}

    @classmethod
    def noted(cls, directory: Path, spec: MachineSpec, detail: Mapping[str, Any], node: str) -> Lineage:
        """That of a machine of an earlier life of this node, from the note and the block node that it
        writes to: it may have sealed a layer that was not noted any more."""
        image = [Path(path) for path in detail.get("image") or ()]
        known = [Path(path) for path in detail.get("sealed", ())]
        depth = len(spec.layers)
        sealed: list[Path] = []
        while live_node(depth) != node:
            own = disk_file(directory, depth)
            if not own.exists():
                raise ValueError(f"it writes to {node}, which is no layer of its own")
            sealed.append(known[len(sealed)] if len(sealed) < len(known) else own)
            depth += 1
        return cls(
            directory,
            spec.layers,
            tuple(sealed),
            MemoryImage(image[0], tuple(image[1:])) if image else None,
            detail.get("ran", True),
        )


def disk_file(directory: Path, depth: int) -> Path:
    """A machine's own layer that lies upon `depth` others."""
    return directory / f"{live_node(depth)}.qcow2"


def memory_file(directory: Path) -> Path:
    """The memory of a machine that was booted."""
    return directory / "memory"
