"""Between what a machine captures and is restored from, and what a record says of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentenv.errors import StoreFault
from agentenv.snapshot.records import DiskLayer, Memory, MemoryDelta, Snapshot, StoredFile
from agentenv.vmm.layer import unreadable
from agentenv.vmm.machine import Capture, Layer, MemoryImage, SavedState

F = TypeVar("F", bound=StoredFile)


@dataclass(frozen=True)
class Contents:
    """The part of a record that a capture gives."""

    disk: tuple[DiskLayer, ...]
    memory: Memory
    state: StoredFile


def describe(home: Path, capture: Capture, parent: Snapshot | None) -> Contents:
    """See Snapshots.describe."""
    known = {file.path: file for file in parent.files()} if parent else {}

    def file(path: Path, kind: type[F]) -> F:
        name = stored(home, path)
        before = known.get(name)
        return before if isinstance(before, kind) else kind(name, _size(path))

    def disk(layer: Layer) -> DiskLayer:
        name = stored(home, layer.path)
        before = known.get(name)
        return (
            before
            if isinstance(before, DiskLayer)
            else DiskLayer(name, _size(layer.path), None, layer.format)
        )

    base = file(capture.image.base, StoredFile)
    deltas = tuple(file(path, MemoryDelta) for path in capture.image.deltas)
    layers = tuple(disk(layer) for layer in capture.layers)
    return Contents(layers, Memory(base, deltas), file(capture.device_state, StoredFile))


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
