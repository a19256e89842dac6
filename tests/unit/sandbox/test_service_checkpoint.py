"""Checkpoints, forks, rollbacks and many at a time: who keeps what, and what is left after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.errors import (
    AenvError,
    CapacityExceeded,
    Conflict,
    HostFault,
    InvalidRequest,
    NotFound,
    StoreFull,
)
from agentenv.sandbox.forking import Child
from agentenv.sandbox.records import Lifecycle, Network, Records, Sandbox
from agentenv.sandbox.requests import Answer
from agentenv.sandbox.transitions import State
from support.sandbox_parts import MemoryNode, prepared, quiet, wanted


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[MemoryNode]:
    async with prepared(tmp_path, max_sandboxes=8) as node:
        yield node


@pytest.fixture
async def sandbox(node: MemoryNode) -> Sandbox:
    return (await node.service.create(wanted(env={"A": "1"}, metadata={"k": "v"}))).sandbox


def made(results: list[Answer | AenvError]) -> list[Sandbox]:
    assert all(isinstance(each, Answer) for each in results), results
    return [each.sandbox for each in results if isinstance(each, Answer)]


# Checkpoints


async def test_a_checkpoint_lets_the_sandbox_run_on(node: MemoryNode, sandbox: Sandbox) -> None:
    snapshot, phases = await node.service.checkpoint(sandbox.id, "mine")
    assert (snapshot.kind, snapshot.names, snapshot.durable) == ("checkpoint", ("mine:default",), True)
    assert (snapshot.sandbox_id, snapshot.parent) == (sandbox.id, sandbox.start)
    assert [phase.name for phase in phases.ended] == ["stop", "capture", "run", "publish"]
    after = node.service.get(sandbox.id)
    assert (after.state, after.generation, after.snapshot) == (State.RUNNING, 1, snapshot.id)
    assert node.hypervisor.machines[sandbox.id].running
    assert node.service.route(sandbox.id) is not None


async def test_a_second_one_is_built_upon_the_first(node: MemoryNode, sandbox: Sandbox) -> None:
    one, _ = await node.service.checkpoint(sandbox.id)
    two, _ = await node.service.checkpoint(sandbox.id)
    assert two.parent == one.id
    assert set(one.disk) < set(two.disk)
    assert one.memory is not None and two.memory is not None
    assert two.memory.deltas[:-1] == one.memory.deltas
    node.service.delete_snapshot(one.id)
    await node.service.snapshots.collect()
    node.service.snapshots.require_files(two)


async def test_it_is_a_template_also_when_its_source_is_gone(node: MemoryNode, sandbox: Sandbox) -> None:
    snapshot, _ = await node.service.checkpoint(sandbox.id, "mine")
    await node.service.kill(sandbox.id)
    await node.service.snapshots.collect()
    for reference in (snapshot.id, "mine", "mine:default"):
        child = (await node.service.create(wanted(reference, env={"B": "2"}))).sandbox
        told = node.identities[-1]
        assert told.env == {"LANG": "C.UTF-8", "A": "1", "B": "2"}
        assert told.hostname == child.id != sandbox.id
        assert child.template == sandbox.template
        assert child.start == snapshot.id
    node.service.delete_snapshot(snapshot.id)
    with pytest.raises(NotFound):
        await node.service.create(wanted("mine"))


async def test_names(node: MemoryNode, sandbox: Sandbox) -> None:
    one, _ = await node.service.checkpoint(sandbox.id, "mine")
    two, _ = await node.service.checkpoint(sandbox.id, "mine")
    assert node.service.snapshots.get("mine").id == two.id
    assert node.service.snapshots.get(one.id).names == ()
    with pytest.raises(InvalidRequest):
        await node.service.checkpoint(sandbox.id, "no name at all")
    assert node.service.get(sandbox.id).state is State.RUNNING


async def test_of_a_paused_one_nothing_is_written(node: MemoryNode, sandbox: Sandbox) -> None:
    await node.service.pause(sandbox.id)
    await quiet()
    node.steps.passed.clear()
    snapshot, _ = await node.service.checkpoint(sandbox.id, "mine")
    assert node.steps.passed == []
    paused = node.service.snapshots.get(str(node.service.get(sandbox.id).snapshot))
    assert (snapshot.disk, snapshot.memory, snapshot.state) == (paused.disk, paused.memory, paused.state)
    await node.service.kill(sandbox.id)
    await node.service.snapshots.collect()
    assert (await node.service.create(wanted("mine"))).sandbox.start == snapshot.id


async def test_of_the_disk_alone(node: MemoryNode, sandbox: Sandbox) -> None:
    snapshot, _ = await node.service.checkpoint(sandbox.id, memory=False)
    assert (snapshot.memory, snapshot.state, snapshot.fingerprint) == (None, None, {})
    assert "freeze" in node.steps.passed
    full, _ = await node.service.checkpoint(sandbox.id)
    assert full.memory is not None
    node.service.snapshots.require_files(full)
    node.steps.passed.clear()
    await node.service.create(wanted(snapshot.id))
    assert "boot" in node.steps.passed


@pytest.mark.parametrize("step", ["stop", "capture", "run"])
async def test_one_that_fails_leaves_it_running(node: MemoryNode, sandbox: Sandbox, step: str) -> None:
    error = StoreFull("no space")
    if step == "run":  # the first one; the second try lets it go on
        original = node.hypervisor.machines[sandbox.id].run

        async def once() -> None:
            node.hypervisor.machines[sandbox.id].run = original  # type: ignore[method-assign]
            raise error

        node.hypervisor.machines[sandbox.id].run = once  # type: ignore[method-assign]
    else:
        node.steps.fail(step, error)
    with pytest.raises(StoreFull):
        await node.service.checkpoint(sandbox.id)
    if step != "run":
        node.steps.mend(step)
    assert node.service.get(sandbox.id) == sandbox
    assert node.hypervisor.machines[sandbox.id].running
    assert node.service.snapshots.check() == ()
    await node.service.checkpoint(sandbox.id)


async def test_a_template_s_name_is_refused_and_it_runs_on(node: MemoryNode, sandbox: Sandbox) -> None:
    with node.database.transaction() as cursor:
        cursor.execute("INSERT INTO templates VALUES ('t1', 'taken', 1, 0)")
    with pytest.raises(Conflict, match="name of a template"):
        await node.service.checkpoint(sandbox.id, "taken")
    assert node.service.get(sandbox.id) == sandbox
    assert node.hypervisor.machines[sandbox.id].running


async def test_a_machine_that_dies_under_it_fails_the_sandbox(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.hold("capture")
    taking = asyncio.create_task(node.service.checkpoint(sandbox.id))
    await node.steps.reached("capture")
    node.hypervisor.machines[sandbox.id].die()
    node.steps.let_go("capture")
    with pytest.raises(HostFault):
        await taking
    await quiet()
    node.assert_empty()


@pytest.mark.parametrize("step", ["stop", "capture"])
async def test_one_that_the_node_did_not_survive(node: MemoryNode, sandbox: Sandbox, step: str) -> None:
    node.steps.hold(step)
    taking = asyncio.create_task(node.service.checkpoint(sandbox.id))
    await node.steps.reached(step)
    node.steps._gates.clear()
    service = await node.restart()
    assert service.get(sandbox.id) == sandbox
    assert node.hypervisor.machines[sandbox.id].running
    assert service.snapshots.check() == ()
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    snapshot, _ = await service.checkpoint(sandbox.id)
    service.snapshots.require_files(snapshot)


@pytest.mark.parametrize("memory", [True, False])
async def test_one_on_record_is_what_the_next_one_builds_upon(
    node: MemoryNode, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    """Though the node died before the sandbox's record said so."""
    update = Records.update

    def lost(self: Records, record: Sandbox, *, forget_claim: bool = False) -> None:
        if record.state is not State.RUNNING:
            update(self, record, forget_claim=forget_claim)

    with monkeypatch.context() as patch:
        patch.setattr(Records, "update", lost)
        first, _ = await node.service.checkpoint(sandbox.id, memory=memory)
    service = await node.restart()
    again = service.get(sandbox.id)
    assert (again.state, again.target) == (State.RUNNING, None)
    assert again.snapshot == (first.id if memory else sandbox.snapshot)
    service.delete_snapshot(first.id)
    await service.snapshots.collect()
    second, _ = await service.checkpoint(sandbox.id)
    assert second.parent == again.snapshot
    service.snapshots.require_files(second)


# Rollback


async def test_back_to_a_checkpoint_in_place(node: MemoryNode, sandbox: Sandbox) -> None:
    snapshot, _ = await node.service.checkpoint(sandbox.id)
    [(_, slot)] = node.slots.taken.values()
    before = node.service.get(sandbox.id)
    node.identities.clear()
    ends: list[int] = []
    node.service.on_generation_end(lambda _, generation: ends.append(generation))
    after = (await node.service.rollback(sandbox.id, snapshot.id)).sandbox
    assert (after.state, after.snapshot, after.generation) == (State.RUNNING, snapshot.id, 2)
    assert (after.access_token, after.end_at) == (before.access_token, before.end_at)
    assert [taken for _, taken in node.slots.taken.values()] == [slot]
    assert node.identities[0].hostname is None
    assert ends == [1]
    assert len(node.hypervisor.machines) == 1


async def test_back_to_the_start_it_is_told_who_it_is(node: MemoryNode, sandbox: Sandbox) -> None:
    await node.service.checkpoint(sandbox.id)
    node.identities.clear()
    after = (await node.service.rollback(sandbox.id)).sandbox
    assert after.snapshot == sandbox.start
    [told] = node.identities
    assert (told.hostname, told.machine_id, told.access_token) == (
        sandbox.id,
        sandbox.machine_id,
        sandbox.access_token,
    )
    assert told.env == {"LANG": "C.UTF-8", "A": "1"}


async def test_a_paused_one_goes_back_and_runs(node: MemoryNode, sandbox: Sandbox) -> None:
    snapshot, _ = await node.service.checkpoint(sandbox.id)
    await node.service.pause(sandbox.id)
    await quiet()
    assert (await node.service.rollback(sandbox.id, snapshot.id)).sandbox.state is State.RUNNING
    assert node.service.snapshots.of_kinds(("pause",)) == ()


async def test_only_to_its_own(node: MemoryNode, sandbox: Sandbox) -> None:
    other = (await node.service.create(wanted())).sandbox
    foreign, _ = await node.service.checkpoint(other.id)
    for name in (foreign.id, "nope", str(sandbox.start) + "x"):
        with pytest.raises(NotFound):
            await node.service.rollback(sandbox.id, name)
    assert node.service.get(sandbox.id) == sandbox
    assert node.hypervisor.machines[sandbox.id].running


async def test_a_rollback_that_fails_leaves_it_paused_there(node: MemoryNode, sandbox: Sandbox) -> None:
    snapshot, _ = await node.service.checkpoint(sandbox.id)
    node.steps.fail("restore", HostFault("no luck"))
    with pytest.raises(HostFault):
        await node.service.rollback(sandbox.id, snapshot.id)
    node.steps.mend("restore")
    await quiet()
    record = node.service.get(sandbox.id)
    assert (record.state, record.snapshot) == (State.PAUSED, snapshot.id)
    assert "no luck" in (record.reason or "")
    assert (node.hypervisor.machines, node.slots.taken) == ({}, {})
    service = await node.restart()
    assert (await service.connect(sandbox.id, 100)).resumed
    assert service.snapshots.get(snapshot.id)  # a checkpoint stays


@pytest.mark.parametrize("dies", [True, False])
async def test_one_that_a_rollback_leaves_paused_is_not_kept_for_good(node: MemoryNode, dies: bool) -> None:
    lifecycle = Lifecycle("pause", paused_timeout_s=60)
    sandbox = (await node.service.create(wanted(lifecycle=lifecycle))).sandbox
    snapshot, _ = await node.service.checkpoint(sandbox.id)
    service = node.service
    if dies:
        node.steps.hold("restore")
        rollback = asyncio.create_task(service.rollback(sandbox.id, snapshot.id))
        await node.steps.reached("restore")
        node.steps._gates.clear()
        service = await node.restart()
        rollback.cancel()
        await asyncio.gather(rollback, return_exceptions=True)
    else:
        node.steps.fail("restore", HostFault("no luck"))
        with pytest.raises(HostFault):
            await service.rollback(sandbox.id, snapshot.id)
        await quiet()
    assert service.get(sandbox.id).state is State.PAUSED
    assert service.get(sandbox.id).paused_until == node.clock.now() + 60
    node.clock.jump(60)
    await quiet()
    with pytest.raises(NotFound):
        service.get(sandbox.id)


# Forks


async def test_children_are_others_and_inherit(node: MemoryNode) -> None:
    lifecycle = Lifecycle("pause", auto_resume=True)
    request = wanted(
        env={"A": "1", "B": "1"}, metadata={"k": "v"}, lifecycle=lifecycle, network=Network(public=False)
    )
    parent = (await node.service.create(request)).sandbox
    node.identities.clear()
    wishes = [Child({"n": "1"}, {"B": "2"}), Child({"k": "w"})]
    children = made(await node.service.fork(parent.id, 3, 50, wishes))
    assert len({parent.id, *(child.id for child in children)}) == 4
    assert len({parent.access_token, *(child.access_token for child in children)}) == 4
    assert len({parent.traffic_token, *(child.traffic_token for child in children)}) == 4
    assert len({parent.machine_id, *(child.machine_id for child in children)}) == 4
    assert [child.metadata for child in children] == [{"k": "v", "n": "1"}, {"k": "w"}, {"k": "v"}]
    told = {each.sandbox_id: each for each in node.identities}
    assert [(told[child.id].env or {})["B"] for child in children] == ["2", "1", "1"]
    assert all(told[child.id].hostname == child.id for child in children)
    assert {child.lifecycle for child in children} == {lifecycle}
    assert {child.end_at for child in children} == {node.clock.now() + 50}
    assert node.steps.passed.count("capture") == 1
    assert node.service.snapshots.of_kinds(("fork",)) == ()
    assert node.service.get(parent.id).end_at == parent.end_at


async def test_what_children_stand_on_stays_while_they_do(node: MemoryNode, sandbox: Sandbox) -> None:
    [child] = made(await node.service.fork(sandbox.id))
    await node.service.kill(sandbox.id)
    service = await node.restart()
    await service.snapshots.collect()
    point = service.snapshots.recorded(str(child.start))
    assert point is not None
    service.snapshots.require_files(point)
    assert (await service.rollback(child.id)).sandbox.state is State.RUNNING
    await service.kill(child.id)
    await service.snapshots.collect()
    assert service.snapshots.recorded(point.id) is None


async def test_each_child_has_its_own_result(node: MemoryNode, sandbox: Sandbox) -> None:
    node.slots.capacity = 3
    results = await node.service.fork(sandbox.id, 4)
    failed = [each for each in results if isinstance(each, CapacityExceeded)]
    assert len(failed) == 2
    assert node.service.count == 3
    assert len(node.hypervisor.machines) == len(node.slots.taken) == 3


@pytest.mark.parametrize("step", ["stop", "capture"])
async def test_nothing_stays_of_a_fork_whose_caller_goes(
    node: MemoryNode, sandbox: Sandbox, step: str
) -> None:
    node.steps.hold(step)
    asked = asyncio.ensure_future(node.service.fork(sandbox.id))
    await node.steps.reached(step)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    node.steps.let_go(step)
    while node.service.get(sandbox.id).state is State.FORKING:
        await asyncio.sleep(0.001)
    await quiet()
    assert node.service.snapshots.of_kinds(("fork",)) == ()
    assert node.service.count == 1


async def test_a_paused_one_forks_asleep(node: MemoryNode, sandbox: Sandbox) -> None:
    await node.service.pause(sandbox.id)
    await quiet()
    children = made(await node.service.fork(sandbox.id, 2))
    assert {child.state for child in children} == {State.RUNNING}
    assert node.service.get(sandbox.id).state is State.PAUSED
    assert (await node.service.connect(sandbox.id, 10)).resumed


@pytest.mark.parametrize("count", [0, -1, 101])
async def test_counts_have_bounds(node: MemoryNode, sandbox: Sandbox, count: int) -> None:
    with pytest.raises(InvalidRequest, match="1 to 100"):
        await node.service.fork(sandbox.id, count)
    with pytest.raises(InvalidRequest, match="1 to 100"):
        await node.service.batch(wanted(), count)
    with pytest.raises(InvalidRequest, match="are described"):
        await node.service.fork(sandbox.id, 1, None, [Child(), Child()])


async def test_many_from_one_source(node: MemoryNode) -> None:
    request = wanted(env={"A": "1"}, metadata={"k": "v"})
    many = made(await node.service.batch(request, 3, [Child({"n": "1"}, {"A": "2"})]))
    assert [each.metadata for each in many] == [{"k": "v", "n": "1"}, {"k": "v"}, {"k": "v"}]
    assert [each.guest.env["A"] for each in many] == ["2", "1", "1"]
    assert len(node.hypervisor.machines) == 3


# Lineage


async def test_who_descends_from_whom(node: MemoryNode, sandbox: Sandbox) -> None:
    one, _ = await node.service.checkpoint(sandbox.id)
    two, _ = await node.service.checkpoint(sandbox.id)
    await node.service.rollback(sandbox.id, one.id)
    three, _ = await node.service.checkpoint(sandbox.id)
    [root] = node.service.snapshots.tree(sandbox.id)
    assert root.snapshot.id == one.id
    assert {each.snapshot.id for each in root.children} == {two.id, three.id}
    found = node.service.snapshots.lineage(one.id)
    assert found.parent is not None and found.parent.id == sandbox.start
