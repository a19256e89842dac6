"""Whatever order things happen in: no machine without a record, no record without its machine, no slot
lost, and the listeners hear of every end exactly once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from agentenv.errors import AenvError, HostFault
from agentenv.sandbox.records import Lifecycle
from agentenv.sandbox.requests import Key, NewSandbox
from agentenv.sandbox.service import RETRY_S
from agentenv.sandbox.transitions import ENDS, State
from support.sandbox_parts import MemoryNode, quiet, wanted

STEPS = [
    "acquire", "boot", "ready", "restore", "run", "agent", "init", "stop", "capture", "freeze", "end",
    "release",
]  # fmt: skip


class Chaos:
    """Does random things to a node, each at a random moment of the others."""

    def __init__(self, node: MemoryNode, seed: int) -> None:
        self.node = node
        self.dice = random.Random(seed)
        self.calls: list[asyncio.Task[object]] = []
        self.ends: Counter[tuple[str, int]] = Counter()
        self.held: set[str] = set()
        self.broken: set[str] = set()

    def listen(self) -> None:
        self.node.service.on_generation_end(lambda name, number: self.ends.update([(name, number)]))

    def wish(self) -> NewSandbox:
        """A sandbox of the template or of a checkpoint, with some life ahead."""
        known = [each.id for each in self.node.service.snapshots.of_kinds(("checkpoint",))]
        lifecycle = Lifecycle(
            self.dice.choice(["kill", "pause"]), paused_timeout_s=self.dice.choice([None, 60])
        )
        return wanted(self.dice.choice(["base", *known]), self.dice.randrange(1, 100), lifecycle=lifecycle)

    def some_id(self) -> str:
        known = [live.record.id for live in self.node.service._all]
        return self.dice.choice([*known, "iunknown"])

    async def step(self) -> None:
        service, dice = self.node.service, self.dice
        match dice.randrange(19):
            case 0 | 1 | 2:
                key = Key(f"k{dice.randrange(4)}", "same") if dice.random() < 0.3 else None
                self.call(service.create(self.wish(), key))
            case 3:
                self.call(service.kill(self.some_id()))
            case 4:
                self.call(service.set_timeout(self.some_id(), dice.randrange(-1, 50)))
            case 5:
                self.call(service.connect(self.some_id(), dice.randrange(0, 100)))
            case 6:
                self.node.clock.jump(dice.choice([0.0, 1.0, RETRY_S, 30.0]))
            case 7:
                self.toggle_hold()
            case 8:
                self.toggle_fault()
            case 9:
                if machines := [each for each in self.node.hypervisor.machines.values() if not each.exited]:
                    dice.choice(machines).die()
            case 10:
                if self.calls and dice.random() < 0.5:
                    dice.choice(self.calls).cancel()
            case 11 | 12:
                self.call(service.pause(self.some_id(), memory=dice.random() < 0.7))
            case 13 | 14:
                self.call(service.connect(self.some_id(), dice.randrange(1, 100)))
            case 15:
                self.call(service.checkpoint(self.some_id(), dice.choice([None, "one", "two"])))
            case 16:
                self.call(service.fork(self.some_id(), dice.randrange(1, 3), 50))
            case 17:
                known = [each.id for each in service.snapshots.of_kinds(("checkpoint",))]
                if known and dice.random() < 0.3:
                    service.delete_snapshot(dice.choice(known))
                else:
                    self.call(service.rollback(self.some_id(), dice.choice([None, *known])))
            case 18:
                self.call(service.refresh_memory(self.some_id()))
        await quiet(dice.choice([0, 1, 2, 5, 20]))

    def call(self, work: object) -> None:
        self.calls.append(asyncio.ensure_future(work))  # type: ignore[call-overload]

    def toggle_hold(self) -> None:
        step = self.dice.choice(STEPS)
        if step in self.held:
            self.held.remove(step)
            self.node.steps.let_go(step)
        else:
            self.held.add(step)
            self.node.steps.hold(step)

    def toggle_fault(self) -> None:
        step = self.dice.choice(STEPS)
        if step in self.broken:
            self.broken.remove(step)
            self.node.steps.mend(step)
        else:
            self.broken.add(step)
            self.node.steps.fail(step, HostFault(f"{step} is broken"))

    async def calm(self) -> None:
        """Everything may go on and succeed; then all calls are over."""
        for step in self.held:
            self.node.steps.let_go(step)
        for step in self.broken:
            self.node.steps.mend(step)
        self.held.clear()
        self.broken.clear()
        for _ in range(5):
            await quiet(50)
            self.node.clock.jump(RETRY_S)
        for result in await asyncio.gather(*self.calls, return_exceptions=True):
            results = result if isinstance(result, list) else [result]
            assert all(not isinstance(each, Exception) or isinstance(each, AenvError) for each in results)
            assert not isinstance(result, Exception) or isinstance(result, AenvError), repr(result)
        await quiet(50)

    def check(self) -> None:
        """The node at rest."""
        lives = list(self.node.service._all)
        everyone = {live.record.id for live in lives}
        running = {live.record.id for live in lives if live.record.state is State.RUNNING}
        paused = everyone - running
        assert {live.record.state for live in lives} <= {State.RUNNING, State.PAUSED}
        assert running == set(self.node.hypervisor.machines)
        assert all(machine.running for machine in self.node.hypervisor.machines.values())
        assert everyone == {record.id for record in self.node.records.unended()}
        assert all(live.record == self.node.records.find(live.record.id) for live in lives)
        assert running == {owner for owner, _ in self.node.slots.taken.values()}
        assert all(count == 1 for count in self.ends.values())
        present = {(live.record.id, live.record.generation) for live in lives}
        assert not {each for each in present if each[0] in running} & set(self.ends)
        self.check_snapshots(paused)

    def check_snapshots(self, paused: set[str]) -> None:
        """No snapshot without its files, none of a sandbox's own left without it, and no draft."""
        snapshots = self.node.service.snapshots
        for live in self.node.service._all:
            for role in ("snapshot", "start"):
                assert live.holds[role].record.id == getattr(live.record, role)
                snapshots.require_files(live.holds[role].record)
        for record in snapshots.of_kinds(("checkpoint", "template", "pause", "fork")):
            snapshots.require_files(record)
        own = {record.sandbox_id for record in snapshots.of_kinds(("pause",))}
        assert own <= paused
        assert snapshots.of_kinds(("fork",)) == ()
        assert snapshots.check() == ()


@pytest.mark.parametrize("seed", range(40))
async def test_any_order(tmp_path: Path, seed: int) -> None:
    node = MemoryNode(tmp_path, max_sandboxes=6)
    chaos = Chaos(node, seed)
    await node.service.start()
    chaos.listen()
    for _ in range(150):
        await chaos.step()
    await chaos.calm()
    chaos.check()
    survivors = {live.record.id: live.record.state for live in node.service._all}
    await node.service.stop()
    await node.restart()
    assert {live.record.id: live.record.state for live in node.service._all} == survivors
    chaos.ends.clear()
    await node.service.snapshots.collect()
    chaos.check()
    for name in survivors:
        await node.service.kill(name)
    await node.service.snapshots.collect()
    assert node.service.snapshots.of_kinds(("pause", "fork")) == ()
    await node.service.stop(keep=False)
    node.assert_empty()
    with node.database.transaction() as cursor:
        states = {row[0] for row in cursor.execute("SELECT DISTINCT state FROM sandboxes")}
    assert states <= {str(state) for state in ENDS}
