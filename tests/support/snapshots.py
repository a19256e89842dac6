"""Snapshots with real files, small enough for many."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agentenv.snapshot.draft import Draft
from agentenv.snapshot.records import Descent, DiskLayer, Memory, Resources, Snapshot
from agentenv.snapshot.store import Snapshots
from agentenv.vmm.layer import encode_map, map_of
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
