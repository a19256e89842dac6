"""Machines held ready: made, warmed, handed out, dropped; nothing of them is ever lost."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.errors import CapacityExceeded, HostFault
from agentenv.network.ahead import OWNER, SlotsAhead
from agentenv.network.slot import Slot
from agentenv.sandbox.admission import Admission, Budget, Free, Need
from agentenv.sandbox.agent import Identity
from agentenv.sandbox.pool import LOOK_AGAIN_S, REFILL_AFTER_S, RETRY_S, Pool, need_of
from agentenv.sandbox.pool_plan import Bounds
from agentenv.snapshot.holds import Hold, Holds
from agentenv.snapshot.records import (
    Descent,
    DiskLayer,
    GuestSettings,
    Kind,
    Memory,
    Resources,
    Snapshot,
    StoredFile,
)
from agentenv.vmm.machine import Layer, Machine, MemoryImage, SavedState
from support.sandbox_parts import GUEST, JumpingClock, MemoryHypervisor, MemorySlots, Steps, quiet

KEEP_S = 300.0
BOUNDS = Bounds(least=1, most=4, total=6, slots_least=2, slots_most=5, keep_s=KEEP_S)


def snapshot(name: str, kind: Kind = "template") -> Snapshot:
    return Snapshot(
        id=name,
        kind=kind,
        template=Descent("tbase", "base", "b1"),
        resources=Resources(1, 512, 2048),
        guest=GuestSettings({}, "user", None),
        disk=(DiskLayer("images/base.ext4", 7, format="raw"),),
        memory=Memory(StoredFile(f"snapshots/{name}/memory", 4096)),
        state=StoredFile(f"snapshots/{name}/state", 10),
        created_at=1000.0,
    )


class Shelves:
    """Snapshots by id; what the pool asks of a store."""

    def __init__(self, *snapshots: Snapshot) -> None:
        self.there = {each.id: each for each in snapshots}
        self.holds = Holds()

    def find(self, name_or_id: str) -> Snapshot | None:
        return self.there.get(name_or_id)

    def saved(self, record: Snapshot) -> SavedState | None:
        return SavedState(Path(f"/snapshots/{record.id}/state"), MemoryImage(Path("/memory")))

    def layers(self, record: Snapshot) -> tuple[Layer, ...]:
        return (Layer(Path("/images/base.ext4"), "raw"),)

    def require_files(self, record: Snapshot) -> None:
        pass

    def keep(self, record: Snapshot) -> Hold:
        return self.holds.take(record)


class NamedSlots(MemorySlots):
    """Slots, and whose they are."""

    @property
    def owners(self) -> list[str]:
        return sorted(owner for owner, _ in self.taken.values())


class Rehearsing:
    """An agent that remembers what it was told."""

    def __init__(self, steps: Steps, told: list[Identity]) -> None:
        self._steps = steps
        self._told = told
        self.closed = False

    async def wait_ready(self, machine: Machine, limit_s: float) -> None:
        await self._steps.at("agent")

    async def take_over(self, machine: Machine, identity: Identity, limit_s: float) -> None:
        await self._steps.at("init")
        self._told.append(identity)

    async def health(self) -> None:
        await self._steps.at("health")

    async def rehearse(self, *, user: str, token: str) -> None:
        assert (user, token) == ("user", self._told[-1].access_token)
        await self._steps.at("rehearse")

    async def freeze(self) -> None:
        raise AssertionError("nobody captures what waits on a shelf")

    async def thaw(self) -> None:
        raise AssertionError("nor was it frozen")

    async def close(self) -> None:
        self.closed = True


class Stand:
    """A pool over parts in memory; time passes when told."""

    def __init__(self, *snapshots: Snapshot, room: int = 100, capacity: int = 60, at_once: int = 8) -> None:
        self.steps = Steps()
        self.clock = JumpingClock()
        self.hypervisor = MemoryHypervisor(self.steps)
        self.slots = NamedSlots(self.steps, capacity)
        self.ahead = SlotsAhead(self.slots, self.clock.now)
        self.need = need_of(snapshot("any"))
        budget = Budget(sum([self.need] * room, Need()))
        self.admission = Admission(budget, lambda: Free(1 << 20, 1 << 20))
        self.snapshots = Shelves(*snapshots)
        self.told: list[Identity] = []
        self.agents: list[Rehearsing] = []
        self.pool = Pool(
            self.hypervisor,
            self.ahead,
            self.admission,
            self.snapshots,
            lambda recorded=None: GUEST,
            self._agent,
            bounds=BOUNDS,
            clock=self.clock,
            at_once=at_once,
        )

    def _agent(self, address: str) -> Rehearsing:
        self.agents.append(Rehearsing(self.steps, self.told))
        return self.agents[-1]

    async def pass_time(self, seconds: float = REFILL_AFTER_S) -> None:
        self.clock.jump(seconds)
        await quiet(60)

    def assert_nothing_held(self) -> None:
        assert self.hypervisor.machines == {}
        assert self.slots.owners == []
        assert self.admission.lent == Need()
        assert self.snapshots.holds.ids == set()


BASE = snapshot("s1")


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    made = Stand(BASE)
    made.pool.start()
    await quiet()
    yield made
    await made.pool.stop()
    assert made.admission.lent == Need()


async def test_a_miss_makes_one_that_the_next_caller_gets(stand: Stand) -> None:
    assert stand.pool.take(BASE) is None
    await stand.pass_time()
    assert stand.pool.ready("s1") == 1
    assert stand.admission.lent == stand.need
    assert stand.snapshots.holds.ids == {"s1"}
    pooled = stand.pool.take(BASE)
    assert pooled is not None
    assert pooled.warmed
    assert stand.steps.passed[-6:] == ["restore", "run", "init", "rehearse", "health", "stop"]
    machine = stand.hypervisor.machines[pooled.machine.spec.id]
    assert not machine.running
    assert pooled.machine.spec.nic.namespace == pooled.slot.namespace
    assert stand.admission.lent == Need()  # the caller has reserved it
    assert stand.snapshots.holds.ids == set()  # and keeps the snapshot
    assert stand.slots.taken[pooled.slot.index][0] == pooled.machine.spec.id
    stand.ahead.hand_over(pooled.slot, "i1")
    assert "i1" in stand.slots.owners
    await pooled.machine.end()
    await stand.ahead.release(pooled.slot)


async def test_a_rehearsal_tells_all_that_the_real_start_replaces(stand: Stand) -> None:
    stand.pool.take(BASE)
    await stand.pass_time()
    (told,) = stand.told
    # Certificates and IPv6 are the node's, and added to every identity; a disk that grows is not held ready.
    untold = [name for name, value in vars(told).items() if value is None]
    assert untold == ["default_workdir", "ca_bundle", "ipv6", "disk_mib"]
    assert told.sandbox_id == next(iter(stand.hypervisor.machines))


async def test_machines_of_other_snapshots_do_not_run_before_they_are_taken() -> None:
    checkpoint = snapshot("s2", "checkpoint")
    stand = Stand(checkpoint)
    stand.pool.start()
    stand.pool.take(checkpoint)
    await stand.pass_time()
    assert stand.pool.count == 0  # started from once
    stand.pool.take(checkpoint)
    await stand.pass_time(LOOK_AGAIN_S)
    assert "run" not in stand.steps.passed
    pooled = stand.pool.take(checkpoint)
    assert pooled is not None
    assert not pooled.warmed
    await stand.pool.stop()


async def test_a_snapshot_of_the_disk_alone_is_not_held(stand: Stand) -> None:
    bare = Snapshot("s3", "checkpoint", BASE.template, BASE.resources, BASE.disk, 1.0)
    assert stand.pool.take(bare) is None
    await stand.pass_time()
    assert stand.pool.count == 0


async def test_the_pool_grows_with_a_burst_and_is_empty_when_demand_has_ended(stand: Stand) -> None:
    for _ in range(3):
        stand.pool.take(BASE)
    await stand.pass_time()
    assert stand.pool.ready("s1") == 3
    await stand.pass_time(KEEP_S / 2)
    assert stand.pool.ready("s1") == 3
    await stand.pass_time(KEEP_S)
    assert stand.pool.count == 0
    assert stand.hypervisor.machines == {}
    assert stand.slots.owners == [OWNER] * 2  # the least of slots


async def test_machines_are_made_a_few_at_a_time() -> None:
    stand = Stand(BASE, at_once=1)
    stand.pool.start()
    for _ in range(3):
        stand.pool.take(BASE)
    stand.steps.hold("restore")
    await stand.pass_time()
    assert stand.steps.passed.count("restore") == 1
    stand.steps.let_go("restore")
    await quiet(200)
    assert stand.pool.ready("s1") == 3
    await stand.pool.stop()
    stand.assert_nothing_held()


async def test_nothing_is_made_while_a_start_is_waited_for(stand: Stand) -> None:
    stand.pool.take(BASE)
    with stand.pool.launching():
        await stand.pass_time(LOOK_AGAIN_S)
        assert stand.pool.count == 0
    await stand.pass_time()
    assert stand.pool.count == 1


async def test_real_demand_gets_what_the_pool_holds() -> None:
    stand = Stand(BASE, room=3)
    stand.pool.start()
    for _ in range(3):
        stand.pool.take(BASE)
    await stand.pass_time()
    assert stand.pool.ready("s1") == 3
    stand.admission.reserve("i1", stand.need)
    stand.admission.reserve("i2", stand.need)
    await quiet()
    assert stand.pool.ready("s1") == 1
    assert len(stand.hypervisor.machines) == 1
    stand.admission.reserve("i3", stand.need)
    await quiet()
    assert stand.pool.count == 0
    with pytest.raises(CapacityExceeded):
        stand.admission.reserve("i4", stand.need)
    await stand.pool.stop()
    stand.assert_nothing_held()


async def test_a_machine_that_died_is_not_handed_out(stand: Stand) -> None:
    stand.pool.take(BASE)
    await stand.pass_time()
    (dead,) = stand.hypervisor.machines.values()
    dead.die()
    assert stand.pool.take(BASE) is None
    await stand.pass_time()
    assert dead.spec.id not in stand.hypervisor.machines
    assert dead.spec.id not in stand.slots.owners
    assert stand.pool.ready("s1") == 2


@pytest.mark.parametrize("step", ["acquire", "restore", "run", "init", "rehearse", "stop"])
async def test_a_failed_making_leaves_nothing_and_is_tried_again_later(step: str) -> None:
    stand = Stand(BASE)
    stand.pool.start()
    await quiet()
    stand.pool.take(BASE)
    stand.steps.fail(step, HostFault("no"))
    await stand.pass_time()
    assert stand.pool.count == 0
    assert stand.hypervisor.machines == {}
    assert set(stand.slots.owners) <= {OWNER}
    assert stand.admission.lent == Need()
    assert stand.snapshots.holds.ids == set()
    tried = stand.steps.passed.count(step)
    await stand.pass_time(RETRY_S[0] - 1)
    assert stand.steps.passed.count(step) == tried
    stand.steps.mend(step)
    await stand.pass_time(LOOK_AGAIN_S)
    assert stand.pool.ready("s1") == 1
    await stand.pool.stop()
    stand.assert_nothing_held()


@pytest.mark.parametrize("step", ["acquire", "restore", "run", "init", "rehearse", "stop"])
async def test_stopping_in_the_middle_leaves_nothing(step: str) -> None:
    stand = Stand(BASE)
    stand.steps.hold(step)
    stand.pool.start()
    if step != "acquire":
        await quiet()
    stand.pool.take(BASE)
    stand.clock.jump(REFILL_AFTER_S)
    await stand.steps.reached(step)
    if step == "acquire":
        stand.steps.let_go(step)  # a slot being made ahead is made first
    await stand.pool.stop()
    stand.assert_nothing_held()
    assert stand.pool.take(BASE) is None


async def test_a_deleted_snapshot_is_held_no_longer(stand: Stand) -> None:
    stand.pool.take(BASE)
    await stand.pass_time()
    del stand.snapshots.there["s1"]
    await stand.pass_time(LOOK_AGAIN_S)
    assert stand.pool.count == 0
    assert stand.snapshots.holds.ids == set()


async def test_nothing_is_made_of_a_snapshot_that_is_gone(stand: Stand) -> None:
    stand.pool.take(BASE)
    del stand.snapshots.there["s1"]
    await stand.pass_time()
    assert "restore" not in stand.steps.passed
    assert stand.pool.known == frozenset()


async def test_what_nobody_starts_from_any_more_is_forgotten() -> None:
    many = [snapshot(f"s{number}", "checkpoint") for number in range(50)]
    stand = Stand(*many)
    stand.pool.start()
    for each in many:
        stand.pool.take(each)
    await stand.pass_time()
    assert len(stand.pool.known) == 50
    assert stand.pool.count == 0
    await stand.pass_time(KEEP_S + LOOK_AGAIN_S)
    assert stand.pool.known == frozenset()
    await stand.pool.stop()


async def test_slots_are_made_ahead_and_go_by_name(stand: Stand) -> None:
    assert stand.ahead.spare == 2
    slot = await stand.ahead.acquire("i1")
    assert stand.ahead.spare == 1
    assert stand.slots.taken[slot.index][0] == "i1"
    await stand.pass_time()
    assert stand.ahead.spare == 2
    await stand.ahead.release(slot)


async def test_more_slots_are_made_when_the_spare_ones_are_gone(stand: Stand) -> None:
    taken = [await stand.ahead.acquire(f"i{number}") for number in range(4)]
    assert sorted(stand.slots.owners) == ["i0", "i1", "i2", "i3"]
    await stand.pass_time()
    assert stand.ahead.spare == 4
    for slot in taken:
        await stand.ahead.release(slot)


async def test_a_reap_leaves_what_this_life_made_ahead(stand: Stand) -> None:
    stand.slots.taken[50] = (
        "p-of-before",
        Slot(50, "slot50", Path("/ns/50"), "tap0", "02", "127.0.1.50", 1050),
    )
    assert await stand.ahead.reap(set()) == ["slot50"]
    assert stand.slots.owners == [OWNER] * 2


@pytest.mark.parametrize("seed", range(6))
async def test_random_demand_loses_nothing(seed: int) -> None:
    """Creates, kills, crashes, failures and silence in any order: what is held is counted, once."""
    dice = random.Random(seed)
    kinds = [BASE, snapshot("s2"), snapshot("s3", "checkpoint")]
    stand = Stand(*kinds, room=10, capacity=30, at_once=dice.randint(1, 3))
    stand.pool.start()
    running: dict[str, tuple[Machine, Slot]] = {}
    for number in range(400):
        name = f"i{number}"
        match dice.choice(
            ("create", "create", "create", "kill", "kill", "time", "silence", "crash", "fault")
        ):
            case "create":
                try:
                    stand.admission.reserve(name, stand.need)
                except CapacityExceeded:
                    assert len(running) == 10
                    continue
                pooled = stand.pool.take(dice.choice(kinds))
                if pooled is None:
                    stand.admission.release(name)
                else:
                    stand.ahead.hand_over(pooled.slot, name)
                    await pooled.machine.run()
                    running[name] = (pooled.machine, pooled.slot)
            case "kill" if running:
                gone = dice.choice(sorted(running))
                machine, slot = running.pop(gone)
                await machine.end()
                await stand.ahead.release(slot)
                stand.admission.release(gone)
            case "time":
                await stand.pass_time(dice.uniform(0.1, 20))
            case "silence" if dice.random() < 0.1:
                await stand.pass_time(KEEP_S * 1.1)
            case "crash" if stand.pool.count and dice.random() < 0.3:
                idle = [each for each in stand.hypervisor.machines.values() if not each.running]
                if idle and not idle[0].exited:
                    idle[0].die()
            case "fault":
                step = dice.choice(("acquire", "restore", "init"))
                stand.steps.fail(step, HostFault("no"))
                await stand.pass_time(dice.uniform(0.1, 2))
                stand.steps.mend(step)
        assert not stand.admission.budget.total.short_of(stand.admission.promised)
        assert stand.pool.count <= BOUNDS.total
    await quiet(200)
    pooled_ids = set(stand.hypervisor.machines) - {machine.spec.id for machine, _ in running.values()}
    assert set(stand.slots.owners) == set(running) | pooled_ids | ({OWNER} if stand.ahead.spare else set())
    assert stand.admission.lent == sum([stand.need] * len(pooled_ids), Need())
    await stand.pool.stop()
    assert set(stand.hypervisor.machines) == {machine.spec.id for machine, _ in running.values()}
    assert stand.slots.owners == sorted(running)
    assert stand.admission.lent == Need()
    assert stand.snapshots.holds.ids == set()
