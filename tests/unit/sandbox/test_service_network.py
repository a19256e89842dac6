"""Network rules in a sandbox's life: in force before it runs, changed while it does, kept on record."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentenv.errors import HostFault, NotFound, NotImplementedYet
from agentenv.network.policy import UNRESTRICTED, Policy, parse
from agentenv.sandbox.pool import LOOK_AGAIN_S
from agentenv.sandbox.records import Network, Sandbox
from agentenv.sandbox.transitions import State
from support.sandbox_parts import MemoryNode, prepared, quiet, wanted


def egress(*denied: str) -> Network:
    given = {"denyOut": list(denied)} if denied else None
    return Network(given=given, policy=parse(given, None))


CLOSED, OTHER = egress("0.0.0.0/0"), egress("8.8.8.8")


@pytest.fixture
async def sandbox(node: MemoryNode) -> Sandbox:
    return (await node.service.create(wanted(network=CLOSED))).sandbox


def held(node: MemoryNode, sandbox: Sandbox) -> Policy:
    """The policy at the slot that a sandbox has now."""
    slot = node.service.get(sandbox.id).slot
    assert slot is not None
    return node.slots.policies.get(slot, UNRESTRICTED)


def order(node: MemoryNode) -> list[str]:
    return [step for step in node.steps.passed if step in ("apply", "restore", "boot", "run")]


async def test_rules_are_in_force_before_it_runs(node: MemoryNode, sandbox: Sandbox) -> None:
    assert held(node, sandbox) == CLOSED.policy
    assert order(node).index("apply") < order(node).index("run")
    assert node.records.find(sandbox.id) == sandbox
    assert sandbox.network == CLOSED


async def test_a_sandbox_without_rules_costs_none(node: MemoryNode) -> None:
    await node.service.create(wanted())
    assert "apply" not in node.steps.passed


async def test_rules_that_cannot_be_applied_are_no_sandbox(node: MemoryNode) -> None:
    node.steps.fail("apply", HostFault("nft: no"))
    with pytest.raises(HostFault, match="nft: no"):
        await node.service.create(wanted(network=CLOSED))
    await quiet()
    assert "run" not in order(node)
    node.assert_empty()


async def test_a_restore_that_fails_leaves_no_rules_behind(node: MemoryNode) -> None:
    node.steps.fail("restore", HostFault("no memory"))
    with pytest.raises(HostFault, match="no memory"):
        await node.service.create(wanted(network=CLOSED))
    node.assert_empty()


async def test_a_resumed_one_has_its_rules_first(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.passed.clear()
    await node.service.pause(sandbox.id)
    await quiet()
    assert (await node.service.connect(sandbox.id, 100)).resumed
    assert held(node, sandbox) == CLOSED.policy
    assert order(node) in (["apply", "restore", "run"], ["restore", "apply", "run"])


async def test_a_machine_held_ready_gets_its_rules_first(tmp_path: Path) -> None:
    async with prepared(tmp_path, pool_most=1, pool_least=1) as node:
        while not node.service.pool.count:
            node.clock.jump(LOOK_AGAIN_S)
            await quiet()
        node.steps.passed.clear()
        made = (await node.service.create(wanted(network=CLOSED))).sandbox
        assert order(node)[:2] == ["apply", "run"]
        assert held(node, made) == CLOSED.policy
        node.steps.fail("apply", HostFault("nft: no"))
        with pytest.raises(HostFault, match="nft: no"):
            await node.service.create(wanted(network=CLOSED))


async def test_rules_are_replaced_as_a_whole(node: MemoryNode) -> None:
    given = {"allowPublicTraffic": False, "denyOut": ["8.8.8.8"], "allowOut": ["1.1.1.1"]}
    before = Network(public=False, internet=False, given=given, policy=parse(given, False))
    sandbox = (await node.service.create(wanted(network=before))).sandbox
    await node.service.set_network(sandbox.id, OTHER)
    now = node.service.get(sandbox.id).network
    assert now == Network(False, None, {"allowPublicTraffic": False, "denyOut": ["8.8.8.8"]}, OTHER.policy)
    assert held(node, sandbox) == OTHER.policy
    await node.service.set_network(sandbox.id, egress())
    assert node.service.get(sandbox.id).network == Network(False, None, {"allowPublicTraffic": False})
    assert held(node, sandbox) == UNRESTRICTED
    found = node.records.find(sandbox.id)
    assert found is not None and found.network == node.service.get(sandbox.id).network


async def test_what_cannot_be_applied_changes_nothing(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.fail("apply", HostFault("nft: no"))
    with pytest.raises(HostFault, match="nft: no"):
        await node.service.set_network(sandbox.id, OTHER)
    assert (held(node, sandbox), node.service.get(sandbox.id).network) == (CLOSED.policy, CLOSED)
    found = node.records.find(sandbox.id)
    assert found is not None and found.network == CLOSED
    node.steps.mend("apply")
    await node.service.set_network(sandbox.id, OTHER)
    assert held(node, sandbox) == OTHER.policy


async def test_what_is_not_there_yet_changes_nothing(node: MemoryNode, sandbox: Sandbox) -> None:
    with pytest.raises(NotImplementedYet, match="egressProxy"):
        await node.service.set_network(sandbox.id, Network(given={"egressProxy": {"address": "x"}}))
    assert node.service.get(sandbox.id).network == CLOSED


async def test_a_paused_one_has_them_from_its_next_start(node: MemoryNode, sandbox: Sandbox) -> None:
    await node.service.pause(sandbox.id)
    await quiet()
    node.steps.passed.clear()
    await node.service.set_network(sandbox.id, OTHER)
    assert node.service.get(sandbox.id).network == OTHER
    assert order(node) == []
    await node.service.connect(sandbox.id, 100)
    assert held(node, sandbox) == OTHER.policy


async def test_a_change_in_the_midst_of_a_pause_waits(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.hold("capture")
    pause = asyncio.create_task(node.service.pause(sandbox.id))
    await node.steps.reached("capture")
    change = asyncio.create_task(node.service.set_network(sandbox.id, OTHER))
    await quiet()
    assert not change.done()
    node.steps.let_go("capture")
    await pause
    await change
    assert node.service.get(sandbox.id).state is State.PAUSED
    assert node.service.get(sandbox.id).network == OTHER


async def test_a_pause_that_overtakes_a_change_keeps_it(node: MemoryNode, sandbox: Sandbox) -> None:
    """The slot goes while the rules are on their way to it: they are for the next one."""
    node.steps.hold("apply")
    change = asyncio.create_task(node.service.set_network(sandbox.id, OTHER))
    await node.steps.reached("apply")
    await node.service.pause(sandbox.id)
    node.steps.fail("apply", HostFault("the slot was released"))
    node.steps.let_go("apply")
    await change
    node.steps.mend("apply")
    await node.service.connect(sandbox.id, 100)
    assert held(node, sandbox) == OTHER.policy


async def test_the_last_change_is_the_one_that_holds(node: MemoryNode, sandbox: Sandbox) -> None:
    node.steps.hold("apply")
    first = asyncio.create_task(node.service.set_network(sandbox.id, OTHER))
    await node.steps.reached("apply")
    second = asyncio.create_task(node.service.set_network(sandbox.id, egress("9.9.9.9")))
    await quiet()
    assert node.service.get(sandbox.id).network == OTHER
    node.steps.let_go("apply")
    await asyncio.gather(first, second)
    assert held(node, sandbox) == node.service.get(sandbox.id).network.policy == egress("9.9.9.9").policy


async def test_children_inherit_and_snapshots_do_not(node: MemoryNode, sandbox: Sandbox) -> None:
    snapshot, _ = await node.service.checkpoint(sandbox.id)
    [child] = await node.service.fork(sandbox.id)
    assert not isinstance(child, BaseException)
    assert child.sandbox.network == CLOSED
    assert held(node, child.sandbox) == CLOSED.policy
    fresh = (await node.service.create(wanted(snapshot.id))).sandbox
    assert (fresh.network, held(node, fresh)) == (Network(), UNRESTRICTED)


async def test_the_next_life_of_the_node_has_them_in_force(node: MemoryNode, sandbox: Sandbox) -> None:
    await node.service.set_network(sandbox.id, OTHER)
    node.slots.policies.clear()
    await node.restart()
    assert node.service.get(sandbox.id).network == OTHER
    assert held(node, sandbox) == OTHER.policy


async def test_one_that_is_gone_has_none(node: MemoryNode, sandbox: Sandbox) -> None:
    await node.service.kill(sandbox.id)
    with pytest.raises(NotFound):
        await node.service.set_network(sandbox.id, OTHER)
