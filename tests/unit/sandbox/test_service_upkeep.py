"""Snapshots whose layers are replaced beneath sandboxes: nobody loses a file, and none is kept for good."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.errors import StoreCorrupt
from agentenv.sandbox.transitions import State
from agentenv.snapshot.records import ROOT, Fold, Memory, Snapshot, StoredFile
from support.sandbox_parts import MemoryNode, quiet, wanted


async def folded(node: MemoryNode, snapshot_id: str) -> tuple[Snapshot, Snapshot]:
    """A snapshot before and after its memory became one file."""
    await asyncio.gather(*node.service._core.background)  # its sync, which holds it as well
    snapshots = node.service.snapshots
    before = snapshots.recorded(snapshot_id)
    assert before is not None and before.memory is not None
    path = f"{ROOT}/{before.id}/memory-1"
    (node.settings.home / path).write_text("all of it")
    fold = Fold(path, (before.memory.base.path, *(delta.path for delta in before.memory.deltas)))
    memory = Memory(StoredFile(path, len("all of it")))
    after = snapshots.update(replace(before, memory=memory, folds=(*before.folds, fold)))
    node.service._core.snapshot_changed(before.id)
    await snapshots.collect()
    return before, after


async def test_a_paused_one_lets_the_layers_before_go(node: MemoryNode) -> None:
    sandbox = (await node.service.create(wanted())).sandbox
    await node.service.pause(sandbox.id)
    await quiet()
    snapshots = node.service.snapshots
    record = node.service.get(sandbox.id)
    assert record.snapshot is not None
    before, after = await folded(node, record.snapshot)
    snapshots.require_files(after)
    with pytest.raises(StoreCorrupt):
        snapshots.require_files(before)
    assert (await node.service.connect(sandbox.id, 100)).resumed
    assert node.hypervisor.machines[sandbox.id].image == snapshots.saved(after).memory  # type: ignore[union-attr]
    await snapshots.collect()
    snapshots.require_files(after)  # its record is deleted by now, its files are not


@pytest.mark.parametrize("restarted", [False, True])
async def test_one_that_runs_keeps_what_it_runs_from(node: MemoryNode, restarted: bool) -> None:
    """A machine knows what it was started from, and is captured above that; so it must stay."""
    sandbox = (await node.service.create(wanted())).sandbox
    made, _ = await node.service.checkpoint(sandbox.id)
    before, after = await folded(node, made.id)
    if restarted:
        await node.restart()
        await node.service.snapshots.collect()
    snapshots = node.service.snapshots
    snapshots.require_files(before)
    newer, _ = await node.service.checkpoint(sandbox.id)
    assert after.memory is not None and newer.memory is not None
    assert newer.memory.base == after.memory.base
    assert len(newer.memory.deltas) == 1
    assert newer.folds == after.folds
    snapshots.require_files(newer)
    await node.service.kill(sandbox.id)
    await snapshots.collect()
    snapshots.require_files(newer)
    with pytest.raises(StoreCorrupt):
        snapshots.require_files(before)


async def test_one_about_to_start_from_the_layers_before_keeps_them(node: MemoryNode) -> None:
    sandbox = (await node.service.create(wanted())).sandbox
    await node.service.pause(sandbox.id)
    await quiet()
    snapshot = node.service.get(sandbox.id).snapshot
    assert snapshot is not None
    node.steps.hold("acquire")
    resuming = node.service._core.all.find(sandbox.id)
    assert resuming is not None
    task = asyncio.create_task(node.service.connect(sandbox.id, 100))
    await node.steps.reached("acquire")
    assert resuming.record.state is State.RESUMING
    before, _ = await folded(node, snapshot)
    node.service.snapshots.require_files(before)
    node.steps.let_go("acquire")
    assert (await task).resumed


async def test_machines_are_held_ready_of_the_new_layers(tmp_path: Path) -> None:
    node = MemoryNode(tmp_path, pool_most=2, pool_least=1)
    await node.service.start()
    await node.prepare()
    first = (await node.service.create(wanted())).sandbox
    made, _ = await node.service.checkpoint(first.id)
    for _ in range(2):
        await node.service.create(wanted(made.id))
    _, after = await folded(node, made.id)
    node.clock.jump(1)
    await quiet(100)
    assert node.service.pool.ready(made.id)
    saved = node.service.snapshots.saved(after)
    assert saved is not None
    pooled = [machine for name, machine in node.hypervisor.machines.items() if name.startswith("p")]
    assert saved.memory in [machine.image for machine in pooled]
    await node.service.stop()
