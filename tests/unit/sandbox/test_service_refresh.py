"""A sandbox that starts anew in place: what stays, what is let go, and what is left after a failure."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

from agentenv.errors import Conflict, HostFault, StoreFull
from agentenv.sandbox.pressure import Host, Policy
from agentenv.sandbox.records import Sandbox
from agentenv.sandbox.relief import Relief, host_memory
from agentenv.sandbox.transitions import State
from agentenv.vmm.usage import usage_of
from support.sandbox_parts import MemoryNode, quiet, wanted


@pytest.fixture
async def sandbox(node: MemoryNode) -> Sandbox:
    return (await node.service.create(wanted(env={"A": "1"}))).sandbox


def own_snapshots(node: MemoryNode) -> list[str]:
    return [each.id for each in node.service.snapshots.of_kinds(("pause", "fork"))]


async def test_it_goes_on_as_the_same_with_another_machine(node: MemoryNode, sandbox: Sandbox) -> None:
    ends: list[int] = []
    node.service.on_generation_end(lambda _, generation: ends.append(generation))
    before, route = node.hypervisor.machines[sandbox.id], node.service.route(sandbox.id)
    node.identities.clear()
    phases = await node.service.refresh_memory(sandbox.id)
    assert {"stop", "capture", "publish", "end", "restore", "run", "agent"} <= {
        phase.name for phase in phases.ended
    }
    after = node.service.get(sandbox.id)
    assert after.state is State.RUNNING
    assert (after.generation, after.end_at, after.slot) == (
        sandbox.generation,
        sandbox.end_at,
        sandbox.slot,
    )
    machine = node.hypervisor.machines[sandbox.id]
    assert machine is not before and before.exited and machine.running
    assert node.service.route(sandbox.id) == route
    assert ends == []  # connections go on
    [told] = node.identities
    assert (told.same_peers, told.hostname, told.env) == (True, None, None)
    assert own_snapshots(node) == []
    await node.service.snapshots.collect()
    made = node.service.snapshots.recorded(after.snapshot or "")
    assert made is not None
    node.service.snapshots.require_files(made)
    assert len(node.slots.taken) == 1
    await node.service.refresh_memory(sandbox.id)
    await node.service.kill(sandbox.id)
    node.assert_empty()


async def test_requests_wait_while_it_starts_and_others_find_it_running(
    node: MemoryNode, sandbox: Sandbox
) -> None:
    node.steps.hold("restore")
    refreshing = asyncio.create_task(node.service.refresh_memory(sandbox.id))
    await node.steps.reached("restore")
    assert node.service.route(sandbox.id) is None
    assert node.service.asleep(sandbox.id) == "wakes"
    waking = asyncio.create_task(node.service.wake(sandbox.id))
    await quiet()
    assert not waking.done()
    node.steps.let_go("restore")
    await refreshing
    await waking
    assert node.service.get(sandbox.id).generation == sandbox.generation


@pytest.mark.parametrize("nth", [1, 2])
async def test_a_capture_that_fails_leaves_it_running(
    node: MemoryNode, sandbox: Sandbox, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, original, calls = node.hypervisor.machines[sandbox.id], node.steps.at, 0

    async def at(step: str) -> None:
        nonlocal calls
        calls += step == "capture"
        if step == "capture" and calls == nth:
            raise StoreFull("no space")
        await original(step)

    monkeypatch.setattr(node.steps, "at", at)
    with pytest.raises(StoreFull):
        await node.service.refresh_memory(sandbox.id)
    assert node.service.get(sandbox.id).state is State.RUNNING
    assert node.hypervisor.machines == {sandbox.id: machine}
    assert machine.running
    assert own_snapshots(node) == []
    await node.service.refresh_memory(sandbox.id)


@pytest.mark.parametrize("step", ["restore", "agent"])
async def test_a_start_that_fails_leaves_it_paused(node: MemoryNode, sandbox: Sandbox, step: str) -> None:
    ends: list[int] = []
    node.service.on_generation_end(lambda _, generation: ends.append(generation))
    node.steps.fail(step, HostFault("no memory"))
    with pytest.raises(HostFault):
        await node.service.refresh_memory(sandbox.id)
    record = node.service.get(sandbox.id)
    assert (record.state, record.pause_mode) == (State.PAUSED, "full")
    assert "no memory" in (record.reason or "")
    assert ends == [sandbox.generation]
    assert node.hypervisor.machines == {} and node.slots.taken == {}
    node.steps.mend(step)
    assert (await node.service.connect(sandbox.id, 100)).resumed


@pytest.mark.parametrize(("step", "state"), [("capture", State.RUNNING), ("end", State.PAUSED)])
async def test_one_that_the_node_did_not_survive(
    node: MemoryNode, sandbox: Sandbox, step: str, state: State
) -> None:
    node.steps.hold(step)
    refreshing = asyncio.create_task(node.service.refresh_memory(sandbox.id))
    await node.steps.reached(step)
    refreshing.cancel()
    await asyncio.gather(refreshing, return_exceptions=True)
    live = node.service._core.all.find(sandbox.id)
    assert live is not None and live.operation is not None
    old = node.database
    node.steps.let_go(step)
    node._open()  # a second node on what is on record by now
    live.operation.cancel()
    await asyncio.gather(live.operation, return_exceptions=True)
    old.close()
    await node.service.start()
    assert node.service.get(sandbox.id).state in (state, State.PAUSED)
    assert (await node.service.connect(sandbox.id, 100)).sandbox.state is State.RUNNING


async def test_a_paused_one_has_nothing_to_give(node: MemoryNode, sandbox: Sandbox) -> None:
    await node.service.pause(sandbox.id)
    with pytest.raises(Conflict, match="holds no memory"):
        await node.service.refresh_memory(sandbox.id)


# Looking after the host's memory


def relief(node: MemoryNode, host: Host, **policy: object) -> Relief:
    service = node.service
    given = {"most": "pause", "below_mib": 1000, "stalled": 0.0, "idle_s": 1e-6, **policy}
    return Relief(
        service._core,
        service._refreshing,
        service._pausing,
        Policy(**given),  # type: ignore[arg-type]
        host=lambda: host,
    )


def held(node: MemoryNode, sandbox: Sandbox) -> subprocess.Popen[bytes]:
    """A process with memory of its own, in the place of the sandbox's machine."""
    process = subprocess.Popen(
        [sys.executable, "-c", "x = bytearray(b'x' * (120 << 20)); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    node.hypervisor.machines[sandbox.id].pid = process.pid
    return process


async def test_idle_ones_give_back_when_memory_is_scarce(node: MemoryNode, sandbox: Sandbox) -> None:
    with held(node, sandbox) as process:
        looking = relief(node, Host(100))
        await looking.look()  # seen for the first time, and so not known to be idle
        machine = node.hypervisor.machines[sandbox.id]
        await looking.look()
        after = node.hypervisor.machines[sandbox.id]
        assert after is not machine
        after.pid = process.pid
        await looking.look()
        assert node.service.get(sandbox.id).state is State.PAUSED
        process.communicate(b"\n")


async def test_who_was_asked_for_something_is_left_alone(node: MemoryNode, sandbox: Sandbox) -> None:
    with held(node, sandbox) as process:
        looking = relief(node, Host(100), idle_s=1000.0)
        machine = node.hypervisor.machines[sandbox.id]
        for _ in range(3):
            await looking.look()
        live = node.service._core.all.find(sandbox.id)
        assert live is not None
        known = looking._known[sandbox.id]
        known.active_at = live.active_at = time.monotonic() - 2000
        known.done.add("refresh")
        node.service.route(sandbox.id)
        await looking.look()
        assert known.done == set()
        assert node.hypervisor.machines == {sandbox.id: machine}
        known.active_at = time.monotonic() - 2000
        known.at, known.cpu_s = time.monotonic() - 1, -10.0  # it computed
        live.active_at = 0.0
        await looking.look()
        assert node.hypervisor.machines == {sandbox.id: machine}
        process.communicate(b"\n")


async def test_with_enough_memory_nothing_is_done(node: MemoryNode, sandbox: Sandbox) -> None:
    with held(node, sandbox) as process:
        looking = relief(node, Host(100_000))
        machine = node.hypervisor.machines[sandbox.id]
        for _ in range(3):
            await looking.look()
        assert node.hypervisor.machines == {sandbox.id: machine}
        process.communicate(b"\n")


async def test_one_that_cannot_is_not_asked_again(node: MemoryNode, sandbox: Sandbox) -> None:
    with held(node, sandbox) as process:
        looking = relief(node, Host(100), most="refresh")
        node.steps.fail("capture", StoreFull("no space"))
        for _ in range(3):
            await looking.look()
        assert node.steps.passed.count("capture") == 1
        assert node.service.get(sandbox.id).state is State.RUNNING
        node.steps.mend("capture")
        process.communicate(b"\n")


def test_figures_of_the_host_and_of_a_process() -> None:
    host = host_memory()
    assert host.available_mib > 0
    assert host.stalled is None or 0 <= host.stalled <= 100
    sample = usage_of(os.getpid())
    assert sample is not None and sample.own_mib > 0 and sample.cpu_s > 0
    assert usage_of(2**22 + 1) is None
