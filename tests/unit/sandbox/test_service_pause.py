"""Pausing and resuming: what is kept, what is let go, and what is left after a failure at each phase."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from agentenv.api.answers import detail
from agentenv.errors import Conflict, HostFault, NotFound, StoreCorrupt, StoreFull
from agentenv.sandbox.admission import OVERHEAD_MIB, Need
from agentenv.sandbox.listing import Query
from agentenv.sandbox.pausing import GuestUnresponsive
from agentenv.sandbox.records import Lifecycle, Sandbox
from agentenv.sandbox.registry import file_signature
from agentenv.sandbox.service import RETRY_S
from agentenv.sandbox.transitions import State
from agentenv.vmm.machine import Incompatible
from support.sandbox_parts import MemoryNode, quiet, wanted


@pytest.fixture
async def sandbox(node: MemoryNode) -> Sandbox:
    return (await node.service.create(wanted(env={"A": "1"}))).sandbox


async def paused(node: MemoryNode, sandbox: Sandbox) -> Sandbox:
    await node.service.pause(sandbox.id)
    await quiet()
    return node.service.get(sandbox.id)


def own_snapshots(node: MemoryNode) -> list[str]:
    return [each.id for each in node.service.snapshots.of_kinds(("pause", "fork"))]


async def test_a_paused_sandbox_holds_no_machine_and_no_slot(node: MemoryNode, sandbox: Sandbox) -> None:
    record = await paused(node, sandbox)
    assert (record.state, record.pause_mode) == (State.PAUSED, "full")
    assert node.hypervisor.machines == {}
    assert node.slots.taken == {}
    assert node.service.route(sandbox.id) is None
    assert node.service.list(Query(states=frozenset({"paused"}))).sandboxes == [record]
    assert own_snapshots(node) == [record.snapshot]


async def test_it_goes_on_as_the_same(node: MemoryNode, sandbox: Sandbox) -> None:
    await paused(node, sandbox)
    node.identities.clear()
    answer = await node.service.connect(sandbox.id, 100)
    after = answer.sandbox
    assert answer.resumed
    assert (after.state, after.pause_mode) == (State.RUNNING, None)
    assert (after.id, after.access_token, after.started_at) == (
        sandbox.id,
        sandbox.access_token,
        sandbox.started_at,
    )
    assert after.generation == sandbox.generation + 1
    assert after.end_at == node.clock.now() + 100
    [told] = node.identities  # the clock and randomness only: it knows the rest
    assert (told.hostname, told.machine_id, told.env, told.access_token) == (None, None, None, None)
    assert own_snapshots(node) == []
    assert not (await node.service.connect(sandbox.id, 1)).resumed


async def test_what_it_stands_on_is_kept_while_it_runs(node: MemoryNode, sandbox: Sandbox) -> None:
    """The pause's record goes with the resume, its files with the machine."""
    for _ in range(3):
        record = await paused(node, sandbox)
        assert record.snapshot is not None
        kept = node.service.snapshots.get(record.snapshot)
        await node.service.connect(sandbox.id, 100)
        await node.service.snapshots.collect()
        assert node.service.snapshots.find(record.snapshot) is None
        node.service.snapshots.require_files(kept)
        assert len(kept.memory.deltas if kept.memory else ()) == len(kept.disk) - 2
    await node.service.kill(sandbox.id)
    await asyncio.gather(*node.service._core.background)  # its sync, which holds it as well
    await node.service.snapshots.collect()
    with pytest.raises(StoreCorrupt):
        node.service.snapshots.require_files(kept)


async def test_ten_resumes_at_once_are_one(node: MemoryNode, sandbox: Sandbox) -> None:
    await paused(node, sandbox)
    node.steps.passed.clear()
    answers = await asyncio.gather(*(node.service.connect(sandbox.id, 100) for _ in range(10)))
    assert {answer.sandbox.generation for answer in answers} == {2}
    assert sum(answer.resumed for answer in answers) == 1
    assert node.steps.passed.count("restore") == 1


async def test_ten_pauses_at_once_are_one(node: MemoryNode, sandbox: Sandbox) -> None:
    await asyncio.gather(*(node.service.pause(sandbox.id) for _ in range(10)))
    assert node.steps.passed.count("capture") == 1
    with pytest.raises(Conflict, match="already paused"):
        await node.service.pause(sandbox.id)


async def test_connecting_in_the_midst_of_a_pause_waits_and_resumes(
    node: MemoryNode, sandbox: Sandbox
) -> None:
    node.steps.hold("capture")
    pause = asyncio.create_task(node.service.pause(sandbox.id))
    await node.steps.reached("capture")
    connecting = asyncio.create_task(node.service.connect(sandbox.id, 100))
    await quiet()
    assert not connecting.done()
    node.steps.let_go("capture")
    assert (await connecting).resumed
    await pause
    assert node.service.get(sandbox.id).state is State.RUNNING


async def test_it_is_answered_before_the_machine_has_ended(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.hold("end")
    await node.service.pause(sandbox.id)
    assert node.service.get(sandbox.id).state is State.PAUSED
    assert set(node.hypervisor.machines) == {sandbox.id}
    resuming = asyncio.create_task(node.service.connect(sandbox.id, 100))
    await quiet()
    assert not resuming.done()  # the machine before is to be gone first
    node.steps.let_go("end")
    assert (await resuming).resumed


async def test_a_machine_that_does_not_end_is_tried_again(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.fail("end", HostFault("busy"))
    assert (await paused(node, sandbox)).state is State.PAUSED
    assert set(node.hypervisor.machines) == {sandbox.id}
    node.steps.mend("end")
    node.clock.jump(RETRY_S)
    await quiet()
    assert node.hypervisor.machines == {}
    assert node.slots.taken == {}


@pytest.mark.parametrize("step", ["stop", "capture"])
async def test_a_pause_that_fails_leaves_it_running(node: MemoryNode, sandbox: Sandbox, step: str) -> None:
    ends: list[int] = []
    node.service.on_generation_end(lambda _, generation: ends.append(generation))
    node.steps.fail(step, StoreFull("no space"))
    with pytest.raises(StoreFull, match="no space"):
        await node.service.pause(sandbox.id)
    node.steps.mend(step)
    assert node.service.get(sandbox.id) == sandbox
    assert node.hypervisor.machines[sandbox.id].running
    assert node.service.route(sandbox.id) is not None
    assert (ends, own_snapshots(node), node.service.snapshots.check()) == ([], [], ())
    assert (await paused(node, sandbox)).state is State.PAUSED


async def test_a_snapshot_that_cannot_be_recorded_leaves_it_running(
    node: MemoryNode, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_given: object) -> None:
        raise StoreFull("no space for the record")

    monkeypatch.setattr(node.service.snapshots._table, "insert", full)
    with pytest.raises(StoreFull, match="no space for the record"):
        await node.service.pause(sandbox.id)
    monkeypatch.undo()
    assert node.service.get(sandbox.id) == sandbox
    assert node.hypervisor.machines[sandbox.id].running
    assert (await paused(node, sandbox)).state is State.PAUSED


async def test_a_machine_that_dies_under_the_pause_fails_the_sandbox(
    node: MemoryNode, sandbox: Sandbox
) -> None:
    node.steps.hold("capture")
    pause = asyncio.create_task(node.service.pause(sandbox.id))
    await node.steps.reached("capture")
    node.hypervisor.machines[sandbox.id].die()
    node.steps.let_go("capture")
    with pytest.raises(HostFault, match="is gone"):
        await pause
    await quiet()
    node.assert_empty()
    with pytest.raises(NotFound, match=r"it failed: it could not be paused: .*is gone"):
        node.service.get(sandbox.id)


@pytest.mark.parametrize("step", ["acquire", "restore", "run", "agent", "init"])
async def test_a_resume_that_fails_leaves_it_paused(node: MemoryNode, sandbox: Sandbox, step: str) -> None:
    before = await paused(node, sandbox)
    node.steps.fail(step, HostFault("no luck"))
    with pytest.raises(HostFault, match="no luck"):
        await node.service.connect(sandbox.id, 100)
    node.steps.mend(step)
    await quiet()
    after = node.service.get(sandbox.id)
    assert (after.state, after.snapshot) == (State.PAUSED, before.snapshot)
    assert "no luck" in (after.reason or "")
    assert node.hypervisor.machines == {}
    assert node.slots.taken == {}
    resumed = (await node.service.connect(sandbox.id, 100)).sandbox
    assert (resumed.state, resumed.reason) == (State.RUNNING, None)


async def test_a_missing_layer_is_told_and_nothing_is_begun(node: MemoryNode, sandbox: Sandbox) -> None:
    record = await paused(node, sandbox)
    (node.settings.home / "snapshots" / str(record.snapshot) / "disk").unlink()
    with pytest.raises(StoreCorrupt, match="disk is missing"):
        await node.service.connect(sandbox.id, 100)
    await quiet()
    assert node.service.get(sandbox.id).state is State.PAUSED
    assert node.hypervisor.machines == {}
    assert node.slots.taken == {}
    await node.service.kill(sandbox.id)
    node.assert_empty()


async def test_another_hypervisor_refuses_unless_the_disk_alone_is_wanted(
    node: MemoryNode, sandbox: Sandbox
) -> None:
    await paused(node, sandbox)
    node.versions["version"] = "2"
    with pytest.raises(Incompatible):
        await node.service.connect(sandbox.id, 100)
    node.identities.clear()
    assert (await node.service.connect(sandbox.id, 100, memory=False)).resumed
    assert node.steps.passed[-5:].count("boot") == 1
    [told] = node.identities
    assert (told.hostname, told.machine_id, told.env["A"] if told.env else None) == (
        sandbox.id,
        sandbox.machine_id,
        "1",
    )


async def test_another_hypervisor_has_the_template_prepared_anew(node: MemoryNode) -> None:
    [first] = node.service.snapshots.of_kinds(("template",))
    node.versions["version"] = "2"
    sandboxes = await asyncio.gather(*(node.service.create(wanted()) for _ in range(3)))
    [second] = node.service.snapshots.of_kinds(("template",))
    assert second.id != first.id
    assert {answer.sandbox.start for answer in sandboxes} == {second.id}
    assert node.steps.passed.count("boot") == 1


async def test_a_template_is_booted_once_for_all(tmp_path: Path) -> None:
    node = MemoryNode(tmp_path)
    await node.service.start()
    await asyncio.gather(*(node.service.create(wanted()) for _ in range(5)))
    assert node.steps.passed.count("boot") == 1
    assert node.steps.passed.count("restore") == 5
    assert len(node.hypervisor.machines) == len(node.slots.taken) == 5
    await node.service.stop()


async def test_the_first_boot_of_a_template_is_counted(tmp_path: Path) -> None:
    node = MemoryNode(tmp_path)
    await node.service.start()
    node.steps.hold("boot")
    admission = node.service._core.admission
    creating = asyncio.create_task(node.service.create(wanted()))
    await node.steps.reached("boot")
    assert admission.promised == Need(2 * (512 + OVERHEAD_MIB), 2 * 2048, 2, 1)
    node.steps.let_go("boot")
    sandbox = (await creating).sandbox
    assert admission.promised == Need(512 + OVERHEAD_MIB, 2048, 1, 1)
    await node.service.kill(sandbox.id)
    assert admission.promised == Need()
    await node.service.stop()


@pytest.mark.parametrize("step", ["acquire", "boot", "ready", "agent", "stop", "capture"])
async def test_a_template_that_cannot_be_prepared_leaves_nothing(tmp_path: Path, step: str) -> None:
    node = MemoryNode(tmp_path)
    await node.service.start()
    node.steps.fail(step, HostFault("no luck"))
    with pytest.raises(HostFault, match="no luck"):
        await node.service.create(wanted())
    node.assert_empty()
    assert node.service.snapshots.check() == ()
    assert node.service.snapshots.of_kinds(("template",)) == ()
    node.steps.mend(step)
    assert (await node.service.create(wanted())).sandbox.state is State.RUNNING
    await node.service.stop()


# The disk alone


async def test_a_pause_of_the_disk_alone_boots_again(node: MemoryNode, sandbox: Sandbox) -> None:
    await node.service.pause(sandbox.id, memory=False)
    await quiet()
    record = node.service.get(sandbox.id)
    assert record.pause_mode == "filesystem"
    assert "freeze" in node.steps.passed
    kept = node.service.snapshots.get(str(record.snapshot))
    assert (kept.memory, kept.state) == (None, None)
    assert len(kept.disk) == 3
    node.steps.passed.clear()
    await node.service.connect(sandbox.id, 100)
    assert "boot" in node.steps.passed and "restore" not in node.steps.passed
    again = await paused(node, sandbox)
    assert node.service.snapshots.get(str(again.snapshot)).memory is not None
    assert (await node.service.connect(sandbox.id, 100)).resumed


@pytest.mark.parametrize(("given", "step"), [({"memory": False}, "freeze"), ({"healthy": True}, "health")])
async def test_an_agent_that_does_not_answer(
    node: MemoryNode, sandbox: Sandbox, given: dict[str, bool], step: str
) -> None:
    node.steps.fail(step, OSError("no route"))
    with pytest.raises(GuestUnresponsive, match="runs on"):
        await node.service.pause(sandbox.id, **given)
    assert node.service.get(sandbox.id) == sandbox
    assert node.hypervisor.machines[sandbox.id].running
    node.steps.mend(step)
    await node.service.pause(sandbox.id, **given)


# Time


async def test_it_is_paused_when_its_time_runs_out(node: MemoryNode) -> None:
    lifecycle = Lifecycle("pause", paused_timeout_s=1000)
    sandbox = (await node.service.create(wanted(timeout_s=60, lifecycle=lifecycle))).sandbox
    node.clock.jump(60)
    await quiet(50)
    assert node.service.get(sandbox.id).state is State.PAUSED
    node.clock.jump(999)
    await quiet()
    await node.service.connect(sandbox.id, 60)
    node.clock.jump(60)
    await quiet(50)
    assert node.service.get(sandbox.id).state is State.PAUSED
    node.clock.jump(1000)
    await quiet(50)
    with pytest.raises(NotFound, match="time-to-live"):
        node.service.get(sandbox.id)
    node.assert_empty()
    assert own_snapshots(node) == []


async def test_a_timeout_of_nothing_pauses_it(node: MemoryNode) -> None:
    sandbox = (await node.service.create(wanted(lifecycle=Lifecycle("pause")))).sandbox
    await node.service.set_timeout(sandbox.id, 0)
    await quiet(50)
    assert node.service.get(sandbox.id).state is State.PAUSED


@pytest.mark.parametrize(("memory", "step"), [(True, "health"), (False, "freeze")])
async def test_it_is_paused_at_its_end_though_its_agent_hangs(
    node: MemoryNode, memory: bool, step: str
) -> None:
    lifecycle = Lifecycle("pause", pause_memory=memory)
    sandbox = (await node.service.create(wanted(timeout_s=60, lifecycle=lifecycle))).sandbox
    node.steps.fail(step, OSError("no route"))
    node.clock.jump(60)
    await asyncio.gather(*node.service._core.background)
    record = node.service.get(sandbox.id)
    assert (record.state, record.agent_answered) == (State.PAUSED, False)
    assert detail(record, None).envdUnresponsiveAtPause is True
    node.steps.mend(step)
    woken = (await node.service.connect(sandbox.id, 60)).sandbox
    assert detail(woken, None).envdUnresponsiveAtPause is None
    await node.service.set_timeout(sandbox.id, 0)
    await quiet(50)
    assert node.service.get(sandbox.id).agent_answered


async def test_a_pause_at_the_end_that_fails_is_tried_again_later_and_later(node: MemoryNode) -> None:
    sandbox = (await node.service.create(wanted(timeout_s=60, lifecycle=Lifecycle("pause")))).sandbox
    node.steps.fail("capture", StoreFull("no space"))
    node.clock.jump(60)
    for number, waited in enumerate((5, 10, 20, 40, 80, 160, 300, 300), 1):
        await asyncio.gather(*node.service._core.background)
        assert node.steps.passed.count("capture") == number
        node.clock.jump(waited - 1)
        await asyncio.gather(*node.service._core.background)
        assert node.steps.passed.count("capture") == number
        node.clock.jump(1)
    await asyncio.gather(*node.service._core.background)
    node.steps.mend("capture")
    node.clock.jump(300)
    await asyncio.gather(*node.service._core.background)
    assert node.service.get(sandbox.id).state is State.PAUSED
    live = node.service._core.all.find(sandbox.id)
    assert live is not None and live.failed_pauses == 0


async def test_traffic_wakes_it_where_that_was_wished(node: MemoryNode, sandbox: Sandbox) -> None:
    eager = (await node.service.create(wanted(lifecycle=Lifecycle("pause", auto_resume=True)))).sandbox
    for each in (eager, sandbox):
        assert node.service.asleep(each.id) is None
        await paused(node, each)
    assert (node.service.asleep(eager.id), node.service.asleep(sandbox.id)) == ("wakes", "paused")
    guard = node.service.guard(eager.id)
    assert guard == (eager.access_token, None, True)
    assert node.service.guard("iunknown") is None
    node.steps.passed.clear()
    await asyncio.gather(*(node.service.wake(eager.id) for _ in range(50)))
    assert node.service.route(eager.id) is not None
    assert node.service.get(eager.id).generation == 2  # one resume for them all
    assert node.steps.passed.count("restore") == 1
    await node.service.wake("iunknown")  # no more than a line in the log


async def test_a_signature_wakes_only_whom_traffic_wakes_and_while_it_is_good(
    node: MemoryNode, sandbox: Sandbox
) -> None:
    eager = (await node.service.create(wanted(lifecycle=Lifecycle("pause", auto_resume=True)))).sandbox

    def signer(of: Sandbox, expiration: str | None) -> object:
        signature = file_signature("/a", "read", "user", of.access_token or "", expiration)
        return node.service.by_signature("/a", "read", "user", signature, expiration)

    for each in (eager, sandbox):
        await paused(node, each)
    for good in (None, str(int(time.time()) + 100)):
        assert (signer(eager, good), signer(sandbox, good)) == (eager.id, None)
    for bad in (str(int(time.time()) - 1), "soon", ""):
        assert signer(eager, bad) is None


# Second lives


async def test_a_paused_sandbox_survives_the_node(node: MemoryNode, sandbox: Sandbox) -> None:
    record = await paused(node, sandbox)
    service = await node.restart()
    assert service.get(sandbox.id) == record.with_state(State.PAUSED, slot=None, machine=None)
    await service.snapshots.collect()
    assert (await service.connect(sandbox.id, 100)).resumed
    await service.stop(keep=False)
    node.assert_empty()


@pytest.mark.parametrize("step", ["stop", "capture"])
async def test_a_pause_that_the_node_did_not_survive_did_not_happen(
    node: MemoryNode, sandbox: Sandbox, step: str
) -> None:
    node.steps.hold(step)
    pause = asyncio.create_task(node.service.pause(sandbox.id))
    await node.steps.reached(step)
    node.steps._gates.clear()
    service = await node.restart()
    assert service.get(sandbox.id) == sandbox
    assert node.hypervisor.machines[sandbox.id].running
    assert service.snapshots.check() == ()
    pause.cancel()
    await asyncio.gather(pause, return_exceptions=True)
    await service.kill(sandbox.id)


async def test_an_answered_pause_whose_machine_was_still_there(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.hold("end")
    await node.service.pause(sandbox.id)
    await node.steps.reached("end")
    node.steps._gates.clear()
    service = await node.restart()
    assert service.get(sandbox.id).state is State.PAUSED
    assert node.hypervisor.machines == {}
    assert node.slots.taken == {}
    assert (await service.connect(sandbox.id, 100)).resumed


async def test_a_pause_on_record_has_happened_though_the_sandbox_does_not_say_so(
    node: MemoryNode, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.steps.hold("end")
    update = node.records.__class__.update

    def lost(self: object, record: Sandbox, **given: object) -> None:
        if record.state is not State.PAUSED:
            update(self, record, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(node.records.__class__, "update", lost)
    await node.service.pause(sandbox.id)
    monkeypatch.undo()
    node.steps._gates.clear()
    found = node.records.find(sandbox.id)
    assert found is not None and found.state is State.PAUSING
    service = await node.restart()
    assert service.get(sandbox.id).state is State.PAUSED
    assert node.hypervisor.machines == {}
    assert (await service.connect(sandbox.id, 100)).resumed


@pytest.mark.parametrize("step", ["acquire", "restore", "run", "agent", "init"])
async def test_a_resume_that_the_node_did_not_survive(node: MemoryNode, sandbox: Sandbox, step: str) -> None:
    await paused(node, sandbox)
    node.steps.hold(step)
    resuming = asyncio.create_task(node.service.connect(sandbox.id, 100))
    await node.steps.reached(step)
    node.steps._gates.clear()
    service = await node.restart()
    assert service.get(sandbox.id).state is State.PAUSED
    assert node.hypervisor.machines == {}
    assert node.slots.taken == {}
    resuming.cancel()
    await asyncio.gather(resuming, return_exceptions=True)
    assert (await service.connect(sandbox.id, 100)).resumed


async def test_a_running_one_keeps_what_it_stands_on_in_a_second_life(
    node: MemoryNode, sandbox: Sandbox
) -> None:
    record = await paused(node, sandbox)
    await node.service.connect(sandbox.id, 100)
    service = await node.restart()
    await service.snapshots.collect()
    kept = service.snapshots.recorded(str(record.snapshot))
    assert kept is not None
    service.snapshots.require_files(kept)
    await service.pause(sandbox.id)
    assert (await service.connect(sandbox.id, 100)).resumed
