"""Snapshots with real files, small enough for many."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from agentenv.snapshot.draft import Draft
from agentenv.snapshot.records import Descent, DiskLayer, Memory, Resources, Snapshot
from agentenv.snapshot.store import Snapshots
from agentenv.vmm.layer import encode_map
from agentenv.vmm.memory import Image
from agentenv.vmm.qemu import overlay
from agentenv.vmm.stored import map_of
from agentenv.vmm.transfer import PAGE

PAGES = 16


def fill(draft: Draft, *, flat: bool, page: int = 0) -> None:
    """The files of a capture: the whole memory, or one page of it."""
    (draft.path / "state").write_bytes(b"device state")
    (draft.path / "disk").write_bytes(draft.id.encode() * 100)
    memory = draft.path / "memory"
    if flat:
        memory.write_bytes(bytes([1]) * PAGE * PAGES)
    else:
        memory.write_bytes(bytes([page + 2]) * PAGE)
        map_of(memory).write_bytes(encode_map(np.array([page], np.uint32), PAGES))


def record_of(
    draft: Draft, parent: Snapshot | None = None, *, created_at: float = 1000.0, **fields: object
) -> Snapshot:
    """The record of a filled draft above its parent's layers."""
    if parent is None:
        disk: tuple[DiskLayer, ...] = (DiskLayer("images/base.ext4", 7, format="raw"), draft.disk())
        memory = Memory(draft.flat_memory())
    else:
        assert parent.memory is not None
        disk = (*parent.disk, draft.disk())
        memory = Memory(parent.memory.base, (*parent.memory.deltas, draft.memory_delta()))
    given: dict[str, object] = {
        "id": draft.id,
        "kind": "checkpoint",
        "template": Descent("t1", "base", "b1"),
        "resources": Resources(1, 512, 2048),
        "disk": disk,
        "memory": memory,
        "state": draft.state(),
        "created_at": created_at,
        "parent": parent.id if parent else None,
        "sandbox_id": "i1",
    }
    return Snapshot(**{**given, **fields})  # type: ignore[arg-type]


async def add(
    store: Snapshots,
    parent: Snapshot | None = None,
    *,
    page: int = 0,
    durable: bool = False,
    **fields: object,
) -> Snapshot:
    """A published snapshot."""
    draft = store.begin("i1")
    fill(draft, flat=parent is None, page=page)
    return await store.publish(draft, record_of(draft, parent, **fields), durable=durable)  # type: ignore[arg-type]


def names_below(home: Path) -> set[str]:
    """All files among the snapshots of a data directory, relative to it."""
    return {str(path.relative_to(home)) for path in (home / "snapshots").rglob("*") if path.is_file()}


def write_disk(path: Path, clusters: Mapping[int, int]) -> None:
    """A qcow2 layer that has some clusters, each filled with a byte; 0 is one that reads as zeros."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        overlay.write_empty(descriptor, overlay.MIB)
        entries = {
            number: (5 + place) * overlay.CLUSTER | 1 << 63 if byte else 1
            for place, (number, byte) in enumerate(sorted(clusters.items(), key=lambda item: item[1] == 0))
        }
        table = struct.pack(">16Q", *(entries.get(number, 0) for number in range(16)))
        used = 5 + sum(byte != 0 for byte in clusters.values())
        os.ftruncate(descriptor, used * overlay.CLUSTER)
        os.pwrite(descriptor, struct.pack(">H", 1) * used, 2 * overlay.CLUSTER)
        os.pwrite(descriptor, struct.pack(">Q", 4 * overlay.CLUSTER | 1 << 63), 3 * overlay.CLUSTER)
        os.pwrite(descriptor, table, 4 * overlay.CLUSTER)
        for number, byte in clusters.items():
            if byte:
                at = entries[number] & ~(1 << 63)
                os.pwrite(descriptor, bytes([byte]) * overlay.CLUSTER, at)
    finally:
        os.close(descriptor)


def read_disk(layers: Iterable[Path]) -> dict[int, int]:
    """What clusters read from qcow2 layers, bottom up: those of `write_disk`, or made of them."""
    found: dict[int, int] = {}
    for layer in layers:
        content = layer.read_bytes()
        (first,) = struct.unpack_from(">Q", content, 40)
        (second,) = struct.unpack_from(">Q", content, first)
        for number in range(16 if second else 0):
            (entry,) = struct.unpack_from(">Q", content, (second & ~(1 << 63)) + number * 8)
            if entry & 1:
                found[number] = 0
            elif entry:
                cluster = content[entry & ~(1 << 63) :][: overlay.CLUSTER]
                assert cluster == cluster[:1] * overlay.CLUSTER
                found[number] = cluster[0]
    return found


def read_memory(memory: Memory, home: Path) -> bytes:
    """A memory's content."""
    with Image(home / memory.base.path, [home / delta.path for delta in memory.deltas]) as image:
        words = np.empty((PAGES, PAGE // 8), np.uint64)
        image.read(np.arange(PAGES, dtype=np.uint32), words)
        return words.tobytes()
