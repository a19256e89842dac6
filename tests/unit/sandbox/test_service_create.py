"""Creating sandboxes: what is recorded, what is left after a failure at each phase, who gets in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import (
    CapacityExceeded,
    Conflict,
    GuestFault,
    HostFault,
    NotFound,
    NotImplementedYet,
    StoreFull,
)
from agentenv.sandbox.listing import Query
from agentenv.sandbox.records import Network
from agentenv.sandbox.requests import Key, KeyReused, Stopping
from agentenv.sandbox.service import RETRY_S
from agentenv.sandbox.transitions import State
from support.sandbox_parts import MemoryNode, prepared, quiet, template_of, wanted

PHASES = ["acquire", "restore", "run", "agent", "init"]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[MemoryNode]:
    async with prepared(tmp_path, max_sandboxes=4) as node:
        yield node


async def test_a_created_sandbox_runs_and_is_recorded(node: MemoryNode) -> None:
    request = wanted(timeout_s=60, metadata={"k": "v"}, env={"A": "1", "LANG": "de"})
    answer = await node.service.create(request)
    sandbox = answer.sandbox
    assert node.records.find(sandbox.id) == sandbox == node.service.get(sandbox.id)
    assert sandbox.state is State.RUNNING
    assert (sandbox.started_at, sandbox.end_at) == (node.clock.now(), node.clock.now() + 60)
    assert (sandbox.vcpus, sandbox.memory_mib, sandbox.disk_mib) == (1, 512, 2048)
    assert sandbox.machine == node.hypervisor.machines[sandbox.id].spec
    assert sandbox.slot is not None and sandbox.machine is not None
    assert (sandbox.machine.uid, sandbox.machine.nic.tap) == (sandbox.slot.uid, "tap0")
    assert answer.phases is not None
    assert [phase.name for phase in answer.phases.ended] == ["slot", "restore", "run", "agent"]


async def test_the_guest_is_told_who_it_is(node: MemoryNode) -> None:
    one = (await node.service.create(wanted(env={"A": "1", "LANG": "de"}))).sandbox
    two = (await node.service.create(wanted(secure=False))).sandbox
    first, second = node.identities
    assert (first.sandbox_id, first.hostname, first.template_id) == (one.id, one.id, "tbase")
    assert first.env == {"A": "1", "LANG": "de"}
    assert second.env == {"LANG": "C.UTF-8"}
    assert first.access_token == one.access_token
    assert one.access_token and len(one.access_token) == 64
    assert (second.access_token, two.access_token) == ("", None)
    assert first.machine_id != second.machine_id
    assert first.default_user == "user"


async def test_a_sandbox_is_on_record_before_anything_is_made(node: MemoryNode) -> None:
    for step, slot_known in [("acquire", False), ("restore", True)]:
        node.steps.hold(step)
        creation = asyncio.create_task(node.service.create(wanted()))
        await node.steps.reached(step)
        [record] = [each for each in node.records.unended() if each.state is State.CREATING]
        assert (record.slot is not None) == (record.machine is not None) == slot_known
        assert node.service.route(record.id) is None
        assert record not in node.service.list(Query()).sandboxes
        node.steps.let_go(step)
        await creation


@pytest.mark.parametrize("step", PHASES)
async def test_a_failure_leaves_nothing(node: MemoryNode, step: str) -> None:
    for number in range(10):  # more often than there are slots
        node.steps.fail(step, HostFault(f"no luck {number}"))
        with pytest.raises(HostFault, match=f"no luck {number}"):
            await node.service.create(wanted())
        node.assert_empty()
    node.steps.mend(step)
    assert (await node.service.create(wanted())).sandbox.state is State.RUNNING


async def test_a_failed_launch_that_cannot_be_released_is_tried_again(node: MemoryNode) -> None:
    node.steps.fail("agent", GuestFault("no answer"))
    node.steps.fail("end", HostFault("busy"))
    with pytest.raises(GuestFault, match="no answer"):
        await node.service.create(wanted())
    assert (node.service.count, len(node.slots.taken)) == (1, 1)  # counted, and not given to another
    node.steps.mend("end")
    node.clock.jump(RETRY_S)
    await quiet()
    node.assert_empty()


async def test_a_failed_sandbox_is_remembered_with_its_reason(node: MemoryNode) -> None:
    node.steps.hold("agent")
    creation = asyncio.create_task(node.service.create(wanted()))
    await node.steps.reached("agent")
    [record] = node.records.unended()
    node.steps.fail("agent", GuestFault("no answer"))
    node.steps.let_go("agent")
    with pytest.raises(GuestFault):
        await creation
    failed = node.records.find(record.id)
    assert failed is not None
    assert (failed.state, failed.reason) == (State.FAILED, "it could not be started: no answer")
    with pytest.raises(NotFound, match="it failed: it could not be started: no answer"):
        node.service.get(record.id)


@pytest.mark.parametrize("step", PHASES)
async def test_the_client_that_leaves_does_not_stop_it(node: MemoryNode, step: str) -> None:
    node.steps.hold(step)
    creation = asyncio.create_task(node.service.create(wanted()))
    await node.steps.reached(step)
    creation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creation
    node.steps.let_go(step)
    await quiet()
    [sandbox] = node.service.list(Query()).sandboxes
    assert sandbox.state is State.RUNNING
    assert len(node.slots.taken) == len(node.hypervisor.machines) == 1


@pytest.mark.parametrize("step", PHASES)
async def test_a_creation_cut_off_by_the_node_leaves_nothing(
    node: MemoryNode, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.sandbox.service.STOP_GRACE_S", 0.0)
    node.steps.hold(step)
    creation = asyncio.create_task(node.service.create(wanted()))
    await node.steps.reached(step)
    await node.service.stop()
    with pytest.raises(Stopping):
        await creation
    node.assert_empty()


async def test_a_stopping_node_begins_nothing(node: MemoryNode) -> None:
    await node.service.stop()
    with pytest.raises(Stopping):
        await node.service.create(wanted())


async def test_the_store_that_fills_up_at_the_end_undoes_the_launch(
    node: MemoryNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.steps.hold("init")
    creation = asyncio.create_task(node.service.create(wanted()))
    await node.steps.reached("init")

    def full(*_args: object, **_given: object) -> None:
        raise StoreFull("no space")

    monkeypatch.setattr(node.service._all.records, "update", full)
    node.steps.let_go("init")
    with pytest.raises(StoreFull):
        await creation
    assert node.hypervisor.machines == {}
    assert node.slots.taken == {}
    monkeypatch.undo()
    await node.restart()
    node.assert_empty()


async def test_a_burst_gets_exactly_the_room_there_is(node: MemoryNode) -> None:
    results = await asyncio.gather(
        *(node.service.create(wanted()) for _ in range(50)), return_exceptions=True
    )
    refused = [each for each in results if isinstance(each, CapacityExceeded)]
    assert (len(results) - len(refused), len(refused)) == (4, 46)
    assert len(node.hypervisor.machines) == 4
    assert "4 of 4 sandboxes are promised" in str(refused[0])
    assert refused[0].retry_after is not None


async def test_no_slot_is_a_refusal_like_any_other(node: MemoryNode) -> None:
    node.slots.capacity = 1
    await node.service.create(wanted())
    with pytest.raises(CapacityExceeded):
        await node.service.create(wanted())
    assert node.service.count == 1


async def test_an_unknown_template_costs_nothing(node: MemoryNode) -> None:
    with pytest.raises(NotFound, match="nope"):
        await node.service.create(wanted("nope"))
    assert node.steps.passed == []
    node.assert_empty()


async def test_a_template_counts_by_id_and_by_name(node: MemoryNode) -> None:
    rootfs = node.templates.get("base").rootfs
    node.templates.register(template_of(rootfs, id="tbig", name="big", build_id="another build", vcpus=4))
    assert (await node.service.create(wanted("big"))).sandbox.vcpus == 4
    assert (await node.service.create(wanted("tbig"))).sandbox.template.name == "big"


@pytest.mark.parametrize(
    "given",
    [
        {"network": Network(given={"rules": {"a.test": []}})},
        {"network": Network(given={"httpsPorts": [8443]})},
        {"network": Network(given={"egressProxy": {"address": "x"}})},
    ],
)
async def test_what_cannot_be_honoured_is_refused(node: MemoryNode, given: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedYet):
        await node.service.create(wanted(**given))
    node.assert_empty()


async def test_defaults_of_the_network_pass(node: MemoryNode) -> None:
    network = Network(internet=True, given={"allowOut": [], "rules": {}, "allowPublicTraffic": True})
    sandbox = (await node.service.create(wanted(network=network))).sandbox
    assert sandbox.network == network
    assert sandbox.traffic_token is None


async def test_a_private_sandbox_has_a_traffic_token(node: MemoryNode) -> None:
    sandbox = (await node.service.create(wanted(network=Network(public=False)))).sandbox
    route = node.service.route(sandbox.id)
    assert route is not None
    assert (route.public, route.traffic_token) == (False, sandbox.traffic_token)
    assert sandbox.traffic_token
    assert node.service.route(sandbox.id) is route  # nothing changed


# Idempotency keys


async def test_the_same_key_gives_the_same_sandbox(node: MemoryNode) -> None:
    key = Key("k1", "digest")
    one = await node.service.create(wanted(), key)
    two = await node.service.create(wanted(), key)
    assert one.sandbox == two.sandbox
    assert node.service.count == 1


async def test_the_same_key_while_the_first_is_under_way_waits_for_it(node: MemoryNode) -> None:
    node.steps.hold("restore")
    calls = [asyncio.create_task(node.service.create(wanted(), Key("k1", "digest"))) for _ in range(3)]
    await node.steps.reached("restore")
    await quiet()
    node.steps.let_go("restore")
    assert len({answer.sandbox.id for answer in await asyncio.gather(*calls)}) == 1
    assert node.service.count == 1


async def test_the_same_key_with_another_request_is_refused(node: MemoryNode) -> None:
    await node.service.create(wanted(), Key("k1", "digest"))
    with pytest.raises(KeyReused) as refusal:
        await node.service.create(wanted(), Key("k1", "another"))
    assert refusal.value.status == 422


async def test_a_key_whose_creation_failed_may_be_used_again(node: MemoryNode) -> None:
    node.steps.fail("restore", HostFault("no luck"))
    with pytest.raises(HostFault):
        await node.service.create(wanted(), Key("k1", "digest"))
    node.steps.mend("restore")
    assert (await node.service.create(wanted(), Key("k1", "digest"))).sandbox.state is State.RUNNING


async def test_a_key_is_known_after_a_restart_and_after_the_sandbox(node: MemoryNode) -> None:
    one = await node.service.create(wanted(), Key("k1", "digest"))
    service = await node.restart()
    assert (await service.create(wanted(), Key("k1", "digest"))).sandbox.id == one.sandbox.id
    await service.kill(one.sandbox.id)
    assert (await service.create(wanted(), Key("k1", "digest"))).sandbox.id == one.sandbox.id
    assert service.count == 0


async def test_a_key_is_forgotten_after_a_day(node: MemoryNode) -> None:
    one = await node.service.create(wanted(), Key("k1", "digest"))
    await node.service.kill(one.sandbox.id)
    node.clock.jump(25 * 3600)
    await node.service.create(wanted())  # pruning goes with creating
    again = await node.service.create(wanted(), Key("k1", "digest"))
    assert again.sandbox.id != one.sandbox.id
    assert node.records.find(one.sandbox.id) is None


async def test_a_key_whose_sandbox_is_no_longer_known_says_so(node: MemoryNode) -> None:
    one = await node.service.create(wanted(), Key("k1", "digest"))
    await node.service.kill(one.sandbox.id)
    with node.database.transaction() as cursor:
        cursor.execute("DELETE FROM sandboxes")
    with pytest.raises(Conflict, match="no longer known"):
        await node.service.create(wanted(), Key("k1", "digest"))
