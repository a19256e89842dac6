"""Second lives: what a node makes of the records and the host that it finds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentenv.errors import HostFault, NotFound
from agentenv.sandbox.records import Sandbox
from agentenv.sandbox.transitions import State
from support.sandbox_parts import MemoryNode, quiet, wanted


@pytest.fixture
async def node(tmp_path: Path) -> MemoryNode:
    node = MemoryNode(tmp_path)
    await node.service.start()
    return node


def found(node: MemoryNode, sandbox: Sandbox) -> Sandbox:
    record = node.records.find(sandbox.id)
    assert record is not None
    return record


async def test_a_running_sandbox_is_adopted_and_goes_on(node: MemoryNode) -> None:
    sandbox = (await node.service.create(wanted())).sandbox
    machine = node.hypervisor.machines[sandbox.id]
    await node.service.stop()
    assert machine.detached and not machine.exited
    service = await node.restart()
    assert service.get(sandbox.id) == sandbox
    route = service.route(sandbox.id)
    assert route is not None and sandbox.slot is not None and route.address == sandbox.slot.address
    await service.kill(sandbox.id)
    node.assert_empty()


async def test_after_a_sudden_end_too_and_its_death_is_still_seen(node: MemoryNode) -> None:
    sandbox = (await node.service.create(wanted())).sandbox
    service = await node.restart()
    assert service.get(sandbox.id).state is State.RUNNING
    node.hypervisor.machines[sandbox.id].die()
    await quiet()
    node.assert_empty()
    await service.stop()


async def test_time_goes_on_while_nobody_looks(node: MemoryNode) -> None:
    early = (await node.service.create(wanted(timeout_s=60))).sandbox
    late = (await node.service.create(wanted(timeout_s=600))).sandbox
    node.clock._now += 100
    service = await node.restart()
    node.clock.jump(0)
    await quiet()
    with pytest.raises(NotFound):
        service.get(early.id)
    assert service.get(late.id)
    node.clock.jump(500)
    await quiet()
    node.assert_empty()


async def test_a_machine_that_died_meanwhile(node: MemoryNode) -> None:
    sandbox = (await node.service.create(wanted())).sandbox
    await node.service.stop()
    node.hypervisor.machines[sandbox.id].die()
    await node.restart()
    node.assert_empty()
    assert found(node, sandbox).state is State.FAILED
    assert found(node, sandbox).reason == "its machine was gone when the node started again"


async def test_a_host_that_was_restarted(node: MemoryNode, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = (await node.service.create(wanted())).sandbox
    node.hypervisor.machines.clear()
    node.slots.taken.clear()
    monkeypatch.setattr("agentenv.records.ledger.host_boot_id", lambda: "another")
    await node.restart()
    assert (found(node, sandbox).state, found(node, sandbox).reason) == (
        State.FAILED,
        "the host was restarted",
    )


async def test_a_machine_without_its_slot_is_ended(node: MemoryNode) -> None:
    sandbox = (await node.service.create(wanted())).sandbox
    node.slots.taken.clear()
    await node.restart()
    node.assert_empty()
    assert "network slot" in (found(node, sandbox).reason or "")


async def test_one_that_cannot_be_adopted_does_not_keep_the_others_from_it(node: MemoryNode) -> None:
    one = (await node.service.create(wanted())).sandbox
    two = (await node.service.create(wanted())).sandbox
    adopt = node.hypervisor.adopt

    async def picky(spec: object) -> object:
        if getattr(spec, "id", None) == one.id:
            raise HostFault("its socket does not answer")
        return await adopt(spec)  # type: ignore[arg-type]

    node.hypervisor.adopt = picky  # type: ignore[method-assign, assignment]
    service = await node.restart()
    assert service.get(two.id)
    assert "its socket does not answer" in (found(node, one).reason or "")
    assert set(node.hypervisor.machines) == {two.id}
    assert len(node.slots.taken) == 1


@pytest.mark.parametrize("step", ["acquire", "boot", "agent", "init"])
async def test_a_creation_that_the_node_did_not_survive(node: MemoryNode, step: str) -> None:
    node.steps.hold(step)
    creation = asyncio.create_task(node.service.create(wanted()))
    await node.steps.reached(step)
    [record] = node.records.unended()
    old = node.service
    del old
    await node.restart()
    node.assert_empty()
    assert found(node, record).reason == "the node ended while the sandbox was created"
    creation.cancel()
    await asyncio.gather(creation, return_exceptions=True)


@pytest.mark.parametrize("step", ["end", "release"])
async def test_a_kill_that_the_node_did_not_survive(node: MemoryNode, step: str) -> None:
    sandbox = (await node.service.create(wanted())).sandbox
    node.steps.hold(step)
    kill = asyncio.create_task(node.service.kill(sandbox.id, why="its time-to-live ran out"))
    await node.steps.reached(step)
    node.steps._gates.clear()  # the new life is not held
    await node.restart()
    node.assert_empty()
    assert (found(node, sandbox).state, found(node, sandbox).reason) == (
        State.KILLED,
        "its time-to-live ran out",
    )
    kill.cancel()
    await asyncio.gather(kill, return_exceptions=True)


async def test_what_is_on_no_record_of_a_sandbox_is_reaped(node: MemoryNode) -> None:
    sandbox = (await node.service.create(wanted())).sandbox
    await node.slots.acquire("istray")
    spec = node.hypervisor.machines[sandbox.id].spec
    await node.hypervisor.boot(type(spec)(**{**vars(spec), "id": "istray"}))
    await node.restart()
    assert set(node.hypervisor.machines) == {sandbox.id}
    assert [owner for owner, _ in node.slots.taken.values()] == [sandbox.id]


async def test_stopping_for_good_ends_them_all(node: MemoryNode) -> None:
    for _ in range(3):
        await node.service.create(wanted())
    await node.service.stop(keep=False)
    node.assert_empty()
