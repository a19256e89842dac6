"""Between what a machine captures and is restored from, and what a record says of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentenv.errors import StoreFault
from agentenv.snapshot.chains import folded
from agentenv.snapshot.records import (
    Attached,
    DiskLayer,
    Fold,
    Memory,
    MemoryDelta,
    Snapshot,
    StoredFile,
)
from agentenv.vmm.machine import Capture, Drive, Layer, MemoryImage, SavedState
from agentenv.vmm.stored import unreadable

F = TypeVar("F", bound=StoredFile)


@dataclass(frozen=True)
class Contents:
    """The part of a record that a capture gives."""

    disk: tuple[DiskLayer, ...]
    memory: Memory
    state: StoredFile
    folds: tuple[Fold, ...] = ()
    drives: tuple[tuple[DiskLayer, ...], ...] = ()


def describe(home: Path, capture: Capture, parent: Snapshot | None) -> Contents:
    """See Snapshots.describe."""
    known = {file.path: file for file in parent.files()} if parent else {}
    disks = [
        {stored(home, layer.path): layer.format for layer in layers}
        for layers in (capture.layers, *capture.drives)
    ]
    formats = {name: kind for layers in disks for name, kind in layers.items()}

    def file(name: str, kind: type[F]) -> F:
        before = known.get(name)
        return before if isinstance(before, kind) else kind(name, _size(home / name))

    def layer(name: str) -> DiskLayer:
        before = known.get(name)
        if isinstance(before, DiskLayer):
            return before
        return DiskLayer(name, _size(home / name), None, formats[name])

    # The machine goes on from what it was started with; what has taken the place of that is on record.
    folds = parent.folds if parent else ()
    image = [stored(home, path) for path in (capture.image.base, *capture.image.deltas)]
    (base, *deltas), in_memory = _usable(image, folds, known)
    found = [_usable(list(layers), folds, known) for layers in disks]
    disk, *drives = (tuple(layer(name) for name in names) for names, _ in found)
    used = {*in_memory, *(fold for _, on_disk in found for fold in on_disk)}
    return Contents(
        disk=disk,
        memory=Memory(file(base, StoredFile), tuple(file(name, MemoryDelta) for name in deltas)),
        state=file(stored(home, capture.device_state), StoredFile),
        folds=tuple(fold for fold in folds if fold in used),
        drives=tuple(drives),
    )


def _usable(
    chain: Sequence[str], folds: tuple[Fold, ...], known: Collection[str]
) -> tuple[tuple[str, ...], tuple[Fold, ...]]:
    """The chain as it is on record; as the machine has it where that would name what may be gone."""
    names, used = folded(chain, folds)
    return (names, used) if all(name in known or name in chain for name in names) else (tuple(chain), ())


def saved(home: Path, record: Snapshot) -> SavedState | None:
    """See Snapshots.saved."""
    if record.memory is None or record.state is None:
        return None
    deltas = tuple(home / delta.path for delta in record.memory.deltas)
    image = MemoryImage(home / record.memory.base.path, deltas)
    return SavedState(home / record.state.path, image)


def layers(home: Path, record: Snapshot) -> tuple[Layer, ...]:
    """See Snapshots.layers."""
    return tuple(Layer(home / layer.path, layer.format) for layer in record.disk)


def drives(home: Path, attached: Iterable[Attached]) -> tuple[Drive, ...]:
    """See Snapshots.drives."""
    return tuple(
        Drive(
            tuple(Layer(home / layer.path, layer.format) for layer in each.disk),
            not each.read_only,
            each.disk_mib,
        )
        for each in attached
    )


def stored(home: Path, path: Path) -> str:
    """The name that a record has for a file below the data directory.

    Raises:
        StoreFault: it lies elsewhere.
    """
    if not path.is_relative_to(home):
        raise StoreFault(f"{path} does not lie in the data directory {home}")
    return str(path.relative_to(home))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error
