"""A host without space: machines that stand still, captures and records that cannot be written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from agentenv.errors import StoreFull
from agentenv.records.ledger import Ledger
from agentenv.sandbox.core import COLLECT_AFTER_S
from agentenv.sandbox.records import Records, Sandbox
from agentenv.sandbox.service import RETRY_S
from agentenv.sandbox.transitions import State
from agentenv.snapshot.store import KIND
from agentenv.vmm.machine import MachineSpec
from support.sandbox_parts import MemoryMachine, MemoryNode, quiet, wanted

# As QEMU's event says it.
NO_SPACE: dict[str, object] = {"action": "stop", "nospace": True, "reason": "No space left on device"}


@pytest.fixture
async def sandbox(node: MemoryNode) -> Sandbox:
    return (await node.service.create(wanted())).sandbox


def stall(machine: MemoryMachine) -> None:
    """What a machine that cannot write does."""
    machine.running = False
    machine.events[0]("BLOCK_IO_ERROR", NO_SPACE)


def full(*_args: object, **_given: object) -> None:
    raise StoreFull("no space for the record")


async def test_a_machine_that_cannot_write_goes_on_when_it_can(node: MemoryNode, sandbox: Sandbox) -> None:
    ends: list[int] = []
    node.service.on_generation_end(lambda _, generation: ends.append(generation))
    machine = node.hypervisor.machines[sandbox.id]
    for count in (1, 2):  # it may happen again at once
        stall(machine)
        stall(machine)
        assert (ends, node.service.route(sandbox.id)) == ([1] * count, None)
        assert node.service.asleep(sandbox.id) == "stalled"
        node.clock.jump(RETRY_S)
        await quiet()
        assert machine.running
        assert node.service.route(sandbox.id) is not None
        assert node.service.asleep(sandbox.id) is None
    assert node.service.get(sandbox.id) == sandbox


async def test_one_that_stalls_while_it_is_captured_goes_on_after(
    node: MemoryNode, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = node.hypervisor.machines[sandbox.id]
    publishing, publish = asyncio.Event(), node.service.snapshots.publish
    go_on = asyncio.Event()

    async def slow(*args: object, **given: object) -> object:
        publishing.set()
        await go_on.wait()
        return await publish(*args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(node.service.snapshots, "publish", slow)
    taking = asyncio.create_task(node.service.checkpoint(sandbox.id))
    await publishing.wait()
    stall(machine)
    node.clock.jump(RETRY_S)  # too early: the checkpoint is not through
    await quiet()
    assert node.service.route(sandbox.id) is None
    go_on.set()
    await taking
    node.clock.jump(RETRY_S)
    await quiet()
    assert machine.running
    assert node.service.route(sandbox.id) is not None


async def test_one_that_stalls_as_it_is_paused_is_paused(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.hold("capture")
    pausing = asyncio.create_task(node.service.pause(sandbox.id))
    await node.steps.reached("capture")
    stall(node.hypervisor.machines[sandbox.id])
    node.steps.let_go("capture")
    await pausing
    await quiet()
    node.clock.jump(RETRY_S)
    await quiet()
    assert node.hypervisor.machines == {}
    await node.service.connect(sandbox.id, 100)
    assert node.service.route(sandbox.id) is not None


async def test_one_that_stalls_before_a_second_life_watches_it_goes_on(
    node: MemoryNode, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was let run as it was adopted, and failed at once to write again."""
    machine, adopt = node.hypervisor.machines[sandbox.id], node.hypervisor.adopt
    run, events = machine.run, machine.events

    async def stalls_again() -> None:
        await run()
        machine.running = False
        for callback in events:
            callback("BLOCK_IO_ERROR", NO_SPACE)

    async def adopted(spec: MachineSpec) -> MemoryMachine | None:
        events.clear()
        monkeypatch.setattr(machine, "run", stalls_again)
        return await adopt(spec)

    monkeypatch.setattr(node.hypervisor, "adopt", adopted)
    service = await node.restart()
    await quiet()
    assert service.asleep(sandbox.id) == "stalled"
    monkeypatch.setattr(machine, "run", run)
    node.clock.jump(RETRY_S)
    await quiet()
    assert machine.running
    assert service.route(sandbox.id) is not None


@pytest.mark.parametrize("operation", ["pause", "checkpoint", "fork"])
async def test_a_capture_that_finds_no_space_for_anything_lets_it_run_on(
    node: MemoryNode, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Not even for striking from the ledger what is given up."""
    node.steps.fail("capture", StoreFull("no space for memory"))
    ask: Callable[[str], object] = getattr(node.service, operation)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "strike", full)
        with pytest.raises(StoreFull, match="no space for memory"):
            await ask(sandbox.id)  # type: ignore[misc]
    node.steps.mend("capture")
    assert node.service.get(sandbox.id) == sandbox
    assert node.hypervisor.machines[sandbox.id].running
    ledger = Ledger(node.database)
    assert len(ledger.entries(kind=KIND)) == 1
    node.clock.jump(COLLECT_AFTER_S)
    await asyncio.gather(*node.service._core.background)
    assert ledger.entries(kind=KIND) == []
    assert node.service.snapshots.check() == ()
    await node.service.pause(sandbox.id)


@pytest.mark.parametrize("operation", ["pause", "checkpoint", "fork"])
async def test_a_capture_that_cannot_even_be_begun_leaves_nothing(
    node: MemoryNode, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    ask: Callable[[str], object] = getattr(node.service, operation)
    with monkeypatch.context() as patch:
        patch.setattr(Records, "update", full)
        with pytest.raises(StoreFull, match="no space for the record"):
            await ask(sandbox.id)  # type: ignore[misc]
    await asyncio.gather(*node.service._core.background)
    assert node.service.get(sandbox.id) == sandbox
    assert Ledger(node.database).entries(kind=KIND) == []
    assert node.service.snapshots.check() == ()
    await node.service.pause(sandbox.id)
    assert node.service.get(sandbox.id).state is State.PAUSED


@pytest.mark.parametrize("end", ["killed", "failed"])
async def test_an_end_that_cannot_be_recorded_is_later(
    node: MemoryNode, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    update, still_full = Records.update, [True]

    def maybe(self: Records, record: Sandbox, *, forget_claim: bool = False) -> None:
        if still_full:
            raise StoreFull("no space for the record")
        update(self, record, forget_claim=forget_claim)

    monkeypatch.setattr(Records, "update", maybe)
    if end == "killed":
        await node.service.kill(sandbox.id)
        name = sandbox.id
    else:
        with pytest.raises(StoreFull):
            await node.service.create(wanted())
        [name] = {record.id for record in node.records.unended()} - {sandbox.id}
    for _ in range(2):
        assert name in {record.id for record in node.records.unended()}
        node.clock.jump(COLLECT_AFTER_S)
        await asyncio.gather(*node.service._core.background)
    still_full.clear()
    node.clock.jump(COLLECT_AFTER_S)
    await asyncio.gather(*node.service._core.background)
    assert name not in {record.id for record in node.records.unended()}
    found = node.records.find(name)
    assert found is not None and found.state == end
