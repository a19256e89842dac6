"""The floor under a sandbox's start: the hypervisor's own steps for the same files, with no platform.

A machine is restored through `agentenv.vmm` with a network slot made before, its vcpus are let run, and the
guest's agent is asked once over a new connection. Nothing is recorded but what the hypervisor itself needs.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentenv.config import Settings
from agentenv.guestimage import build as guest
from agentenv.host import accelerator, tsc
from agentenv.network.slots import Slots
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.sandbox.agent import Agent, Identity
from agentenv.sandbox.launch import spec_of
from agentenv.snapshot.listing import Query
from agentenv.snapshot.records import Snapshot
from agentenv.snapshot.store import Snapshots
from agentenv.vmm.qemu.hypervisor import Qemu


@dataclass(frozen=True)
class Start:
    """Seconds of one bare start: until the state is loaded, until the vcpus run, until the answer."""

    restore: float
    run: float
    answer: float

    @property
    def running(self) -> float:
        return self.restore + self.run

    @property
    def total(self) -> float:
        return self.restore + self.run + self.answer


class Floor:
    """Bare starts beside a node, from the snapshots of its data directory."""

    def __init__(self, node: Settings, own: Settings, qemu: Qemu, slots: Slots) -> None:
        self._node = node
        self._own = own
        self._qemu = qemu
        self._slots = slots
        self._count = 0

    async def start(self, snapshot_id: str | None = None, *, identify: bool = False) -> Start:
        """One start from a snapshot, by default the template's first one. The agent is asked for its
        health, or with `identify` told who it is, as a platform has to."""
        self._count += 1
        name = f"floor{self._count}"
        database = Database(self._node.database)
        try:
            snapshots = Snapshots(database, Ledger(database), self._node.home)
            found = _first(snapshots) if snapshot_id is None else snapshots.recorded(snapshot_id)
            assert found is not None, f"there is no snapshot {snapshot_id}"
            saved, layers = snapshots.saved(found), snapshots.layers(found)
        finally:
            database.close()
        assert saved is not None
        slot = await self._slots.acquire(name)
        try:
            spec = spec_of(name, found.resources, slot, layers, guest.load(self._node))
            begun = time.perf_counter()
            machine = await self._qemu.restore(spec, saved)
            loaded = time.perf_counter()
            try:
                await machine.run()
                running = time.perf_counter()
                agent = Agent(slot.address)
                if identify:
                    await agent.take_over(machine, Identity(sandbox_id=name, hostname=name), 60)
                else:
                    await agent.wait_ready(machine, 60)
                answered = time.perf_counter()
                await agent.close()
            finally:
                await machine.end()
        finally:
            await self._slots.release(slot)
        return Start(loaded - begun, running - loaded, answered - running)


def _first(snapshots: Snapshots) -> Snapshot:
    """The newest template snapshot that is there."""
    page = snapshots.list(Query(kinds=frozenset({"template"})))
    return page.snapshots[0]


@asynccontextmanager
async def floor_of(node: Settings) -> AsyncIterator[Floor]:
    """A floor with a data directory of its own beside the node's, removed afterwards."""
    home = Path(tempfile.mkdtemp(prefix="aenv-floor-", dir=node.home.parent))
    own = Settings(home=home, runtime=Path(f"/run/{home.name}"))
    own.runtime_dir.mkdir(mode=0o711, parents=True)
    database = Database(own.database)
    try:
        ledger = Ledger(database)
        choice = await asyncio.to_thread(accelerator.choose, node)
        qemu = Qemu(own, ledger, accelerator=choice.accelerator, tsc_khz=await asyncio.to_thread(tsc.khz))
        slots = Slots(own, ledger)
        await slots.start()
        try:
            yield Floor(node, own, qemu, slots)
        finally:
            await qemu.reap(set())
            await slots.reap(set())
            await slots.stop()
    finally:
        database.close()
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(own.runtime_dir, ignore_errors=True)
