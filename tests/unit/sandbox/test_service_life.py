"""Killing, expiry, machines that die, and one operation at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.errors import Conflict, HostFault, NotFound, StoreFull
from agentenv.sandbox.listing import Query
from agentenv.sandbox.records import Sandbox
from agentenv.sandbox.registry import file_signature
from agentenv.sandbox.service import EXPIRIES_AT_ONCE, RETRY_S
from agentenv.sandbox.transitions import State
from support.sandbox_parts import MemoryNode, prepared, quiet, wanted


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[MemoryNode]:
    async with prepared(tmp_path, max_sandboxes=100) as node:
        node.slots.capacity = 100
        yield node


@pytest.fixture
async def sandbox(node: MemoryNode) -> Sandbox:
    return (await node.service.create(wanted())).sandbox


def ended(node: MemoryNode, sandbox: Sandbox) -> tuple[State, str | None]:
    record = node.records.find(sandbox.id)
    assert record is not None
    return record.state, record.reason


# Killing


async def test_a_killed_sandbox_is_gone_with_all_it_had(node: MemoryNode, sandbox: Sandbox) -> None:
    phases = await node.service.kill(sandbox.id)
    assert [phase.name for phase in phases.ended] == ["release"]
    node.assert_empty()
    assert ended(node, sandbox) == (State.KILLED, "killed")
    with pytest.raises(NotFound):
        await node.service.kill(sandbox.id)


async def test_ten_kills_at_once_are_one(node: MemoryNode, sandbox: Sandbox) -> None:
    await asyncio.gather(*(node.service.kill(sandbox.id) for _ in range(10)))
    assert node.steps.passed.count("end") == 1
    node.assert_empty()


async def test_a_kill_goes_on_without_its_client(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.hold("end")
    kill = asyncio.create_task(node.service.kill(sandbox.id))
    await node.steps.reached("end")
    kill.cancel()
    with pytest.raises(asyncio.CancelledError):
        await kill
    node.steps.let_go("end")
    await quiet()
    node.assert_empty()


async def test_while_it_is_killed_it_is_neither_reached_nor_listed(
    node: MemoryNode, sandbox: Sandbox
) -> None:
    node.steps.hold("end")
    kill = asyncio.create_task(node.service.kill(sandbox.id))
    await node.steps.reached("end")
    assert ended(node, sandbox)[0] is State.KILLING
    assert node.service.route(sandbox.id) is None
    assert node.service.list(Query()).sandboxes == []
    with pytest.raises(NotFound):
        node.service.get(sandbox.id)
    with pytest.raises(NotFound):
        await node.service.set_timeout(sandbox.id, 10)
    with pytest.raises(Conflict):
        await node.service.connect(sandbox.id, 10)
    node.steps.let_go("end")
    await kill


@pytest.mark.parametrize("step", ["end", "release"])
async def test_what_could_not_be_released_is_tried_again(
    node: MemoryNode, sandbox: Sandbox, step: str
) -> None:
    node.steps.fail(step, HostFault("busy"))
    with pytest.raises(HostFault):
        await node.service.kill(sandbox.id)
    assert ended(node, sandbox)[0] is State.KILLING
    assert len(node.slots.taken) == 1  # a slot stays taken while its machine may be there
    node.clock.jump(RETRY_S)
    await quiet()
    assert node.service.count == 1
    node.steps.mend(step)
    node.clock.jump(RETRY_S)
    await quiet()
    node.assert_empty()
    assert ended(node, sandbox) == (State.KILLED, "killed")


async def test_a_failed_release_may_be_repeated_by_the_client(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.fail("end", HostFault("busy"))
    with pytest.raises(HostFault):
        await node.service.kill(sandbox.id)
    node.steps.mend("end")
    await node.service.kill(sandbox.id)
    node.assert_empty()


async def test_a_full_disk_does_not_keep_a_sandbox(
    node: MemoryNode, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_given: object) -> None:
        raise StoreFull("no space")

    monkeypatch.setattr(node.service._all.records, "update", full)
    await node.service.kill(sandbox.id)
    assert (node.service.count, node.hypervisor.machines, node.slots.taken) == (0, {}, {})
    monkeypatch.undo()
    assert ended(node, sandbox)[0] is State.RUNNING
    await node.restart()
    assert ended(node, sandbox)[0] is State.FAILED


# Turns


async def test_a_kill_waits_for_the_creation(node: MemoryNode) -> None:
    node.steps.hold("agent")
    creation = asyncio.create_task(node.service.create(wanted()))
    await node.steps.reached("agent")
    [record] = node.records.unended()
    kill = asyncio.create_task(node.service.kill(record.id))
    await quiet()
    assert not kill.done()
    node.steps.let_go("agent")
    await asyncio.gather(creation, kill)
    node.assert_empty()


async def test_waiting_has_a_limit(node: MemoryNode) -> None:
    node.service._core._turn_limit_s = 0.01
    node.steps.hold("agent")
    creation = asyncio.create_task(node.service.create(wanted()))
    await node.steps.reached("agent")
    [record] = node.records.unended()
    with pytest.raises(Conflict, match="still creating"):
        await node.service.kill(record.id)
    node.steps.let_go("agent")
    await creation


async def test_who_waits_for_a_creation_that_fails_hears_that_it_is_gone(node: MemoryNode) -> None:
    node.steps.hold("agent")
    creation = asyncio.create_task(node.service.create(wanted()))
    await node.steps.reached("agent")
    [record] = node.records.unended()
    kill = asyncio.create_task(node.service.kill(record.id))
    await quiet()
    node.steps.fail("agent", HostFault("no luck"))
    node.steps.let_go("agent")
    with pytest.raises(NotFound, match="no luck"):
        await kill
    with pytest.raises(HostFault):
        await creation


async def test_unknown_ids_are_not_found_by_any_operation(node: MemoryNode) -> None:
    for call in [
        node.service.kill("ix"),
        node.service.connect("ix", 1),
        node.service.set_timeout("ix", 1),
        node.service.refresh("ix", 1),
        node.service.pause("ix"),
        node.service.resume("ix", 1),
        node.service.checkpoint("ix"),
        node.service.rollback("ix"),
        node.service.fork("ix"),
    ]:
        with pytest.raises(NotFound, match="\"ix\" doesn't exist or you don't have access to it"):
            await call


# Time


async def test_it_expires(node: MemoryNode, sandbox: Sandbox) -> None:
    node.clock.jump(299)
    await quiet()
    assert node.service.get(sandbox.id)
    node.clock.jump(1)
    await quiet()
    node.assert_empty()
    with pytest.raises(NotFound, match="time-to-live ran out"):
        node.service.get(sandbox.id)


async def test_connect_and_refresh_only_lengthen(node: MemoryNode, sandbox: Sandbox) -> None:
    start = node.clock.now()
    assert (await node.service.connect(sandbox.id, 10)).sandbox.end_at == start + 300
    assert (await node.service.connect(sandbox.id, 400)).sandbox.end_at == start + 400
    await node.service.refresh(sandbox.id, 5)
    assert node.service.get(sandbox.id).end_at == start + 400
    await node.service.refresh(sandbox.id, 500)
    record = node.records.find(sandbox.id)
    assert record is not None
    assert record.end_at == start + 500
    node.clock.jump(499)
    await quiet()
    assert node.service.count == 1
    node.clock.jump(1)
    await quiet()
    assert node.service.count == 0


async def test_set_timeout_shortens(node: MemoryNode, sandbox: Sandbox) -> None:
    await node.service.set_timeout(sandbox.id, 3)
    node.clock.jump(3)
    await quiet()
    node.assert_empty()


@pytest.mark.parametrize("timeout_s", [0, -5])
async def test_a_timeout_of_nothing_ends_it_before_the_answer(
    node: MemoryNode, sandbox: Sandbox, timeout_s: int
) -> None:
    await node.service.set_timeout(sandbox.id, timeout_s)
    assert node.service.route(sandbox.id) is None
    assert ended(node, sandbox)[0] is State.KILLING
    await quiet()
    node.assert_empty()


async def test_many_expire_side_by_side_within_a_bound(node: MemoryNode) -> None:
    for _ in range(EXPIRIES_AT_ONCE + 10):
        await node.service.create(wanted())
    node.steps.hold("end")
    node.clock.jump(300)
    await quiet()
    assert node.steps.passed.count("end") == EXPIRIES_AT_ONCE
    assert node.service.list(Query()).sandboxes == []  # those that wait are not reached either
    node.steps.let_go("end")
    await quiet(100)
    node.assert_empty()


async def test_one_that_cannot_be_ended_does_not_hold_up_the_others(node: MemoryNode) -> None:
    for _ in range(3):
        await node.service.create(wanted())
    victim = next(iter(node.hypervisor.machines.values()))

    async def stuck() -> None:
        raise HostFault("stuck")

    victim.end = stuck  # type: ignore[method-assign]
    node.clock.jump(300)
    await quiet()
    assert set(node.hypervisor.machines) == {victim.spec.id}
    del victim.end
    node.clock.jump(RETRY_S)
    await quiet()
    node.assert_empty()


# Machines that end by themselves


async def test_a_machine_that_dies_fails_its_sandbox(node: MemoryNode, sandbox: Sandbox) -> None:
    node.hypervisor.machines[sandbox.id].die("qemu: oh no")
    await quiet()
    node.assert_empty()
    assert ended(node, sandbox) == (State.FAILED, "its machine crashed: qemu: oh no")
    with pytest.raises(NotFound, match="it failed: its machine crashed"):
        node.service.get(sandbox.id)


async def test_a_failed_sandbox_that_cannot_be_released_is_tried_again(
    node: MemoryNode, sandbox: Sandbox
) -> None:
    node.steps.fail("release", HostFault("busy"))
    node.hypervisor.machines[sandbox.id].die()
    await quiet()
    assert (node.service.count, len(node.slots.taken)) == (1, 1)
    assert ended(node, sandbox)[0] is State.FAILED
    with pytest.raises(NotFound):
        await node.service.kill(sandbox.id)
    node.steps.mend("release")
    node.clock.jump(RETRY_S)
    await quiet()
    node.assert_empty()
    assert ended(node, sandbox)[0] is State.FAILED


async def test_a_machine_that_dies_while_it_is_killed_is_killed(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.hold("end")
    kill = asyncio.create_task(node.service.kill(sandbox.id))
    await node.steps.reached("end")
    node.hypervisor.machines[sandbox.id].die()
    await quiet()
    node.steps.let_go("end")
    await kill
    assert ended(node, sandbox)[0] is State.KILLED
    node.assert_empty()


# The data plane's questions


async def test_listeners_hear_of_the_end_before_the_machine_goes(node: MemoryNode, sandbox: Sandbox) -> None:
    heard: list[tuple[str, int, int]] = []
    node.service.on_generation_end(
        lambda name, number: heard.append((name, number, len(node.hypervisor.machines)))
    )
    await node.service.kill(sandbox.id)
    other = (await node.service.create(wanted())).sandbox
    node.hypervisor.machines[other.id].die()
    await quiet()
    assert heard == [(sandbox.id, 1, 1), (other.id, 1, 1)]


async def test_the_route_of_a_sandbox(node: MemoryNode, sandbox: Sandbox) -> None:
    route = node.service.route(sandbox.id)
    assert route is not None and sandbox.slot is not None
    assert (route.sandbox_id, route.generation, route.address) == (sandbox.id, 1, sandbox.slot.address)
    assert (route.access_token, route.public) == (sandbox.access_token, True)
    assert node.service.route("ix") is None


async def test_a_signature_finds_its_sandbox(node: MemoryNode, sandbox: Sandbox) -> None:
    await node.service.create(wanted(secure=False))
    token = sandbox.access_token
    assert token is not None
    for expiration in (None, "1900000000"):
        signature = file_signature("/a b", "read", "user", token, expiration)
        route = node.service.by_signature("/a b", "read", "user", signature, expiration)
        assert route == node.service.route(sandbox.id)
        assert node.service.by_signature("/a b", "write", "user", signature, expiration) is None
    assert node.service.by_signature("/a b", "read", "user", "v1_ü\udcff", None) is None
    await node.service.kill(sandbox.id)
    assert node.service.by_signature("/a b", "read", "user", signature, "1900000000") is None


def test_the_signature_is_the_one_that_e2b_makes() -> None:
    from e2b.sandbox.signature import get_signature

    assert (
        file_signature("/p", "read", "user", "tok", None)
        == get_signature("/p", "read", "user", "tok")["signature"]
    )
    made = get_signature("/p", "write", None, "tok", 100)
    assert file_signature("/p", "write", "", "tok", str(made["expiration"])) == made["signature"]
