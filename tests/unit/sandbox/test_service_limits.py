"""Limits over a sandbox's life: in force before it runs, changed, kept, inherited, put in force again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentenv.errors import HostFault, NotFound
from agentenv.limits import NONE, DiskLimits, Limits, NetworkLimits
from agentenv.sandbox.records import Sandbox
from agentenv.sandbox.transitions import State
from support.sandbox_parts import MemoryNode, prepared, quiet, wanted

LIMITS = Limits(NetworkLimits(1 << 20, 2 << 20, 1 << 16), DiskLimits(1 << 20, 100))
OTHER = Limits(disk=DiskLimits(iops=50))


@pytest.fixture
async def sandbox(node: MemoryNode) -> Sandbox:
    return (await node.service.create(wanted(limits=LIMITS))).sandbox


def in_force(node: MemoryNode, sandbox_id: str) -> Limits:
    """What the slot and the machine of a sandbox were told."""
    slot = node.service.get(sandbox_id).slot
    assert slot is not None
    network = node.slots.limits.get(slot.index, NetworkLimits())
    return Limits(network, node.hypervisor.machines[sandbox_id].limits)


async def test_they_are_in_force_before_anything_runs(node: MemoryNode, sandbox: Sandbox) -> None:
    assert sandbox.limits == in_force(node, sandbox.id) == LIMITS
    steps = node.steps.passed
    assert max(steps.index("limit network"), steps.index("limit disk")) < steps.index("run")


async def test_without_them_nobody_is_asked(node: MemoryNode) -> None:
    made = (await node.service.create(wanted())).sandbox
    assert made.limits == NONE
    assert not {"limit network", "limit disk"} & set(node.steps.passed)


async def test_they_hold_for_machines_held_ready(tmp_path: Path) -> None:
    async with prepared(tmp_path, pool_most=1) as node:
        await node.service.create(wanted())  # demand
        node.clock.jump(1)
        while not node.service.pool.count:
            await asyncio.sleep(0)
        node.steps.passed.clear()
        made = (await node.service.create(wanted(limits=LIMITS))).sandbox
        machine_id = made.machine.id if made.machine else ""
        assert machine_id != made.id
        assert node.hypervisor.machines[machine_id].limits == LIMITS.disk
        steps = node.steps.passed
        assert max(steps.index("limit network"), steps.index("limit disk")) < steps.index("run")
        await node.service.stop(keep=False)


@pytest.mark.parametrize("step", ["limit network", "limit disk"])
async def test_a_create_that_cannot_be_limited_fails_and_leaves_nothing(node: MemoryNode, step: str) -> None:
    node.steps.fail(step, HostFault("the kernel said no"))
    with pytest.raises(HostFault):
        await node.service.create(wanted(limits=LIMITS))
    await quiet()
    node.assert_empty()


async def test_they_are_kept_over_a_pause_and_a_rollback(node: MemoryNode, sandbox: Sandbox) -> None:
    await node.service.pause(sandbox.id)
    await quiet()
    await node.service.connect(sandbox.id, 100)
    assert in_force(node, sandbox.id) == LIMITS
    await node.service.rollback(sandbox.id)
    assert in_force(node, sandbox.id) == LIMITS
    await node.service.refresh_memory(sandbox.id)
    assert in_force(node, sandbox.id) == LIMITS


async def test_forks_inherit_them_and_sandboxes_of_a_snapshot_do_not(
    node: MemoryNode, sandbox: Sandbox
) -> None:
    [child] = await node.service.fork(sandbox.id)
    assert not isinstance(child, BaseException)
    assert in_force(node, child.sandbox.id) == LIMITS
    snapshot, _ = await node.service.checkpoint(sandbox.id)
    fresh = (await node.service.create(wanted(snapshot.id))).sandbox
    assert in_force(node, fresh.id) == NONE


async def test_they_are_changed_while_it_runs(node: MemoryNode, sandbox: Sandbox) -> None:
    await node.service.set_limits(sandbox.id, OTHER)
    assert node.service.get(sandbox.id).limits == in_force(node, sandbox.id) == OTHER
    await node.service.set_limits(sandbox.id, NONE)
    assert node.service.get(sandbox.id).limits == in_force(node, sandbox.id) == NONE
    with pytest.raises(NotFound):
        await node.service.set_limits("iunknown", OTHER)


async def test_those_of_a_paused_one_are_in_force_when_it_is_resumed(
    node: MemoryNode, sandbox: Sandbox
) -> None:
    await node.service.pause(sandbox.id)
    await quiet()
    await node.service.set_limits(sandbox.id, OTHER)
    await node.service.connect(sandbox.id, 100)
    assert in_force(node, sandbox.id) == OTHER


@pytest.mark.parametrize("step", ["limit network", "limit disk"])
async def test_a_change_that_fails_leaves_those_of_before(
    node: MemoryNode, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    class Once(HostFault):
        pass

    calls = 0
    at = node.steps.at

    async def failing(name: str) -> None:
        nonlocal calls
        if name == step:
            calls += 1
            if calls == 1:
                raise Once("the kernel said no")
        await at(name)

    monkeypatch.setattr(node.steps, "at", failing)
    with pytest.raises(Once):
        await node.service.set_limits(sandbox.id, OTHER)
    assert node.service.get(sandbox.id).limits == in_force(node, sandbox.id) == LIMITS


async def test_changes_at_once_come_one_after_the_other(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.hold("limit disk")
    first = asyncio.create_task(node.service.set_limits(sandbox.id, OTHER))
    await node.steps.reached("limit disk")
    second = asyncio.create_task(node.service.set_limits(sandbox.id, LIMITS))
    pausing = asyncio.create_task(node.service.pause(sandbox.id))
    await quiet()
    assert node.service.get(sandbox.id).state is State.RUNNING
    node.steps.let_go("limit disk")
    await asyncio.gather(first, second, pausing)
    await quiet()
    await node.service.connect(sandbox.id, 100)
    assert node.service.get(sandbox.id).limits == in_force(node, sandbox.id) == LIMITS


async def test_a_new_life_puts_them_in_force_again(node: MemoryNode, sandbox: Sandbox) -> None:
    free = (await node.service.create(wanted())).sandbox
    for each in (sandbox, free):  # as if the node had died in the midst of a change
        node.hypervisor.machines[each.id].limits = OTHER.disk
    node.slots.limits.clear()
    await node.restart()
    assert in_force(node, sandbox.id) == LIMITS
    assert in_force(node, free.id) == NONE


async def test_what_cannot_be_limited_then_goes_on_all_the_same(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.fail("limit network", HostFault("the kernel said no"))
    service = await node.restart()
    assert service.get(sandbox.id).state is State.RUNNING
