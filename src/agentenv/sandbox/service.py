"""The sandboxes of this node: what can be done with them, one operation at a time each.

A state is decided and committed synchronously, then the operation runs as a task of its own that
finishes whatever its caller does. The rules are in `transitions`, the machines in `launch`, what all
operations share in `core`; each operation is a module of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from agentenv.config import Settings
from agentenv.errors import AenvError
from agentenv.identity.quotas import no_quota
from agentenv.identity.records import Quota
from agentenv.limits import Limits
from agentenv.network.ahead import SlotsAhead
from agentenv.proxy.directory import Asleep, Guard, Route
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.sandbox.admission import Admission, Budget, host_free
from agentenv.sandbox.agent import Agent
from agentenv.sandbox.checkpointing import Checkpointing
from agentenv.sandbox.core import RETRY_S, Core, GenerationEnd, outcome
from agentenv.sandbox.creating import Creating
from agentenv.sandbox.ending import Ending
from agentenv.sandbox.forking import Child, Forking, Results
from agentenv.sandbox.launch import AgentClient, Launcher
from agentenv.sandbox.limiting import Limiting
from agentenv.sandbox.listing import Page, Query, select
from agentenv.sandbox.live import Live
from agentenv.sandbox.networking import Networking
from agentenv.sandbox.observing import Change, Observer, Running
from agentenv.sandbox.parts import Clock, GuestFilesSource, Images, Slots, SystemClock, Templates
from agentenv.sandbox.pausing import Pausing, set_paused_end
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.pool import Pool, bounds_of, makers_of
from agentenv.sandbox.prepare import FIRST_KINDS, Prepared
from agentenv.sandbox.pressure import Policy
from agentenv.sandbox.records import Network, Records, Sandbox
from agentenv.sandbox.recovery import drop_orphans, recover_all
from agentenv.sandbox.refreshing import Refreshing
from agentenv.sandbox.registry import Registry
from agentenv.sandbox.relief import Relief
from agentenv.sandbox.requests import Answer, Key, NewSandbox
from agentenv.sandbox.resuming import Resuming
from agentenv.sandbox.source import IMAGE
from agentenv.sandbox.sources import Sources
from agentenv.sandbox.surroundings import Surroundings
from agentenv.sandbox.transitions import ENDS, SHOWN, Operation, State
from agentenv.snapshot.records import Snapshot
from agentenv.snapshot.store import Snapshots
from agentenv.snapshot.upkeep import Upkeep
from agentenv.vmm.machine import Hypervisor

__all__ = ["EXPIRIES_AT_ONCE", "RETRY_S", "STOP_GRACE_S", "Sandboxes"]

log = logging.getLogger(__name__)

TURN_LIMIT_S = 60.0
EXPIRIES_AT_ONCE = 16
STOP_GRACE_S = 10.0


class Sandboxes:
    """All sandboxes of a node. It is also the data plane's `Directory`."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        ledger: Ledger,
        hypervisor: Hypervisor,
        slots: Slots,
        templates: Templates,
        guest_files: GuestFilesSource,
        *,
        snapshots: Snapshots | None = None,
        clock: Clock | None = None,
        admission: Admission | None = None,
        agent_at: Callable[[str], AgentClient] | None = None,
        turn_limit_s: float = TURN_LIMIT_S,
        upkeep: Upkeep | None = None,
        images: Images | None = None,
        quota_of: Callable[[str | None], Quota] = no_quota,
    ) -> None:
        self.snapshots = snapshots or Snapshots(database, ledger, settings.home)
        agent_at = agent_at or partial(Agent, around=Surroundings.of(settings, ipv6=slots.ipv6).around)
        clock = clock or SystemClock()
        admission = admission or Admission(Budget.of(settings), lambda: host_free(settings.home))
        ahead = SlotsAhead(slots, clock.now)
        self.pool = Pool(
            hypervisor,
            ahead,
            admission,
            self.snapshots,
            guest_files,
            agent_at,
            bounds=bounds_of(settings),
            clock=clock,
            at_once=makers_of(settings),
            ready_limit_s=settings.resume_timeout_s,
        )
        launcher = Launcher(
            hypervisor,
            ahead,
            self.snapshots,
            guest_files,
            agent_at,
            boot_timeout_s=settings.boot_timeout_s,
            resume_timeout_s=settings.resume_timeout_s,
            ready=self.pool,
        )
        self._core = Core(
            settings,
            Records(database),
            launcher,
            self.snapshots,
            clock,
            self._expire,
            admission=admission,
            boot_id=ledger.boot_id,
            turn_limit_s=turn_limit_s,
            upkeep=upkeep,
            quota_of=quota_of,
        )
        self.home = settings.home
        self.launcher = launcher
        self.admission = admission
        self.prepared = Prepared(self._core)
        self._templates = templates
        sources = Sources(settings, templates, self.snapshots, images)
        self._creating = Creating(self._core, sources, self.prepared)
        self._ending = Ending(self._core)
        self._pausing = Pausing(self._core)
        self._resuming = Resuming(self._core)
        self._checkpointing = Checkpointing(self._core)
        self._forking = Forking(self._core, self._creating, self._checkpointing)
        self._limiting = Limiting(self._core)
        self._networking = Networking(self._core)
        self._refreshing = Refreshing(self._core, self._checkpointing, self._resuming)
        self._relief = Relief(self._core, self._refreshing, self._pausing, Policy.of(settings))
        self._expiries = asyncio.Semaphore(EXPIRIES_AT_ONCE)

    @property
    def _all(self) -> Registry:
        return self._core.all

    @property
    def recent(self) -> deque[Phases]:
        """What the last operations spent their time on, oldest first."""
        return self._core.recent

    def operations(self, sandbox_id: str) -> list[Phases]:
        """Those of one sandbox, which may have ended meanwhile.

        Raises:
            NotFound: nothing is known of such a sandbox.
        """
        found = [each for each in self._core.recent if each.sandbox_id == sandbox_id]
        if not found:
            self.get(sandbox_id)
        return found

    # Life of the service

    async def start(self) -> None:
        """Adopt the sandboxes of an earlier life, reap what else is left of it, and let time run on."""
        core, launcher = self._core, self._core.launcher
        # First what was not finished: while its files are there, a machine captured to end cannot go on.
        for name in await self.snapshots.reap():
            log.warning("snapshot %s of an earlier life of this node was not finished: removed", name)
        adopted = await recover_all(
            core.all.records,
            launcher.hypervisor,
            launcher.slots,
            self.snapshots,
            boot_id=core.boot_id,
            now=core.clock.now(),
            ended=lambda record: core.tell(
                Change.FAILED if record.state is State.FAILED else Change.KILLED,
                record,
                reason=record.reason or "",
            ),
        )
        for each in adopted:
            live = core.all.take(Live(each.record, each.machine, each.slot))
            core.hold(live)
            core.count(live.record)
            if live.machine is not None:
                core.watch_adopted(live)
            if live.record.state is State.PAUSED:
                set_paused_end(core, live)
            else:
                core.expiry.set(live.record.id, live.record.end_at)
        await self._limiting.enforce_all()
        drop_orphans(self.snapshots, [each.record for each in adopted])
        core.collect_soon()
        core.prune()
        if core.upkeep is not None:
            core.upkeep.start(starts=core.starts_of, changed=core.snapshot_changed)
        self.pool.start()
        self._relief.start()

    async def stop(self, *, keep: bool = True) -> None:
        """Begin nothing new, let operations under way end, and let go of the machines.

        With `keep` the machines run on, to be adopted at the next start; else they are ended. What is
        paused stays so.
        """
        core = self._core
        core.stopping = True
        core.expiry.stop()
        core.stop_collecting()
        await self._relief.stop()
        if not keep:
            running = [live.record.id for live in core.all if live.record.state is not State.PAUSED]
            kills = [self.kill(each, why="the node stopped") for each in running]
            await asyncio.gather(*kills, return_exceptions=True)  # each is logged where it happens
        await self._let_operations_end()
        await self.prepared.stop()
        await self.pool.stop()
        if core.upkeep is not None:
            await core.upkeep.stop()
        await _cut_off({live.watch for live in core.all if live.watch is not None} | core.background)
        for live in core.all:
            live.let_go()
            if live.machine is not None:
                live.machine.detach()
        core.all.clear()

    async def _let_operations_end(self) -> None:
        """Wait for operations for a while, then cut them off; they undo what they did."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STOP_GRACE_S
        while under_way := {live.operation for live in self._core.all if live.operation is not None}:
            left_s = deadline - loop.time()
            if left_s <= 0:
                await _cut_off(under_way)
            else:
                await asyncio.wait(under_way, timeout=left_s)
            await asyncio.sleep(0)  # what is over is struck by then, and what follows is seen

    # Looking

    def get(self, sandbox_id: str) -> Sandbox:
        """The sandbox of that id.

        Raises:
            NotFound: there is none, or it has ended; the message says how where that is known.
        """
        live = self._all.find(sandbox_id)
        if live is None or live.record.state not in SHOWN:
            raise self._all.missing(sandbox_id)
        return live.record

    def project_of(self, sandbox_id: str) -> str | None:
        """Whose a sandbox is, or was; None where that is not known."""
        return self._all.project_of(sandbox_id)

    def list(self, query: Query) -> Page:
        """A page of sandboxes."""
        return select((live.record for live in self._all), query)

    @property
    def count(self) -> int:
        """Sandboxes that exist now, in whatever state."""
        return len(self._all)

    def route(self, sandbox_id: str) -> Route | None:
        """See proxy.directory.Directory."""
        return self._all.route(sandbox_id)

    def asleep(self, sandbox_id: str) -> Asleep | None:
        """See proxy.directory.Directory."""
        return self._all.asleep(sandbox_id)

    def guard(self, sandbox_id: str) -> Guard | None:
        """See proxy.directory.Directory."""
        return self._all.guard(sandbox_id)

    async def wake(self, sandbox_id: str) -> None:
        """See proxy.directory.Directory."""
        live = self._all.find(sandbox_id)
        timeout_s = self._core.settings.timeout_s if live is None else live.record.timeout_s
        try:
            await self._resuming.connect(sandbox_id, timeout_s)
        except AenvError as error:
            log.warning("sandbox %s is not woken by traffic: %s", sandbox_id, error)

    def states(self) -> Iterable[State]:
        """The state of each sandbox that exists now."""
        return (live.record.state for live in self._all)

    def running(self) -> Iterable[Running]:
        """The sandboxes that have a machine now."""
        for live in self._all:
            if live.machine is not None and live.slot is not None and not live.machine.exited:
                slot = live.slot
                yield Running(live.record, live.machine.pid, slot.address, slot.name, live.busy)

    def observe(self, observer: Observer) -> None:
        """Have `observer` told what goes on from now on."""
        self._core.observers.add(observer)

    def by_signature(
        self, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route | str | None:
        """See proxy.directory.Directory."""
        return self._all.by_signature(path, operation, username, signature, expiration)

    def on_generation_end(self, callback: GenerationEnd) -> None:
        """Have `callback(sandbox_id, generation)` called when a generation of a machine ends or is
        given up, after it has stopped to have a route: connections to it are to be aborted."""
        self._core.listeners.append(callback)

    # Operations

    async def create(self, request: NewSandbox, key: Key | None = None) -> Answer:
        """A new sandbox, running and with its agent ready.

        A `key` seen before with the same request gives the sandbox that was made then.

        Raises:
            InvalidRequest: its size or drives cannot be, or there is no such image. NotFound: no such
                template or snapshot. CapacityExceeded: the node is full. KeyReused: see there.
                Incompatible: the snapshot was taken on another host or hypervisor. DriveFailed: the guest
                cannot use a drive. Forbidden, Unreachable: an image cannot be had.
            GuestFault, HostFault, StoreFault: it could not be started; nothing is left of it.
        """
        return await self._creating.create(request, key)

    async def batch(self, request: NewSandbox, count: int = 1, children: Sequence[Child] = ()) -> Results:
        """`count` new sandboxes from one template or snapshot, each with its own result.

        Raises:
            InvalidRequest: `count` is not 1 to 100. NotFound, CapacityExceeded: as `create`, for all.
        """
        return await self._forking.batch(request, count, children)

    async def kill(self, sandbox_id: str, *, why: str = "killed") -> Phases:
        """End a sandbox and release all it had; a second caller waits for the same end.

        Raises:
            NotFound: there is none. Conflict: another operation on it does not end.
        """
        return await self._ending.kill(sandbox_id, why)

    async def connect(self, sandbox_id: str, timeout_s: int, *, memory: bool = True) -> Answer:
        """The sandbox, running, for at least `timeout_s` seconds from now (never less than it had). A
        paused one is resumed, without `memory` by booting from its disk.

        Raises:
            NotFound, Conflict: as for `kill`. Incompatible: it was paused on another host or hypervisor.
            CapacityExceeded, GuestFault, HostFault, StoreFault: it could not be started, and is paused
                as before.
        """
        return await self._resuming.connect(sandbox_id, timeout_s, memory=memory)

    async def resume(self, sandbox_id: str, timeout_s: int) -> Answer:
        """The same for a paused sandbox only.

        Raises:
            Conflict: it runs.
        """
        return await self._resuming.connect(sandbox_id, timeout_s, must_be_paused=True)

    async def set_limits(self, sandbox_id: str, limits: Limits) -> None:
        """Have other limits on a sandbox's network and disk in force when this returns; on those of a paused
        one when it is resumed.

        Raises:
            NotFound, Conflict: as for `kill`. HostFault: they cannot be; it has those of before.
        """
        await self._limiting.change(sandbox_id, limits)

    async def refresh(self, sandbox_id: str, duration_s: int) -> None:
        """Let the sandbox live for at least `duration_s` seconds from now."""
        core = self._core
        live, _ = await core.turn(sandbox_id, Operation.TIMEOUT)
        core.set_end(live, max(live.record.end_at, core.clock.now() + duration_s))

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        """Let the sandbox live `timeout_s` seconds from now, more or less than before. With 0 or less
        its end, or its pause, has begun when this returns."""
        core = self._core
        live, _ = await core.turn(sandbox_id, Operation.TIMEOUT)
        if timeout_s > 0:
            core.set_end(live, core.clock.now() + timeout_s)
        elif live.busy:  # a checkpoint or fork goes on first
            core.set_end(live, core.clock.now())
        elif live.record.lifecycle.on_timeout == "pause":
            self._pausing.enter(live, memory=live.record.lifecycle.pause_memory, expired=True)
        else:
            self._ending.enter(live, "its time-to-live was set to 0", None)

    async def pause(self, sandbox_id: str, *, memory: bool = True, healthy: bool = False) -> Phases:
        """Make a snapshot of a sandbox and end its machine; without `memory` only its disk is kept, and
        its next start boots. With `healthy` only if its agent answers. What was answered survives the
        death of the node.

        Raises:
            Conflict: it is paused already. GuestUnresponsive: the agent does not answer.
            StoreFull, StoreFault, HostFault: it could not be written; the sandbox runs on, or has failed
                where its machine is gone.
        """
        return await self._pausing.pause(sandbox_id, memory=memory, healthy=healthy)

    async def set_network(self, sandbox_id: str, egress: Network) -> None:
        """Replace what a sandbox may reach, as a whole: in force when this returns, and flows that are not
        allowed any more are cut. A paused one has it from its next start on.

        Raises:
            NotImplementedYet: it asks for what there is not. NotFound: there is none.
            HostFault: it could not be applied; what was before is in force.
        """
        await self._networking.replace(sandbox_id, egress)

    async def checkpoint(
        self, sandbox_id: str, name: str | None = None, *, memory: bool = True
    ) -> tuple[Snapshot, Phases]:
        """A snapshot of a sandbox, which runs on or stays paused; it survives the host when answered.

        Raises:
            InvalidRequest, Conflict: the name cannot be one, or is a template's.
            StoreFull, StoreFault, HostFault: as `pause`.
        """
        return await self._checkpointing.checkpoint(sandbox_id, name, memory=memory)

    async def refresh_memory(self, sandbox_id: str) -> Phases:
        """Have a running sandbox give back the memory that it changed: it starts anew, in place, from a
        file that the host can share and drop. Its processes and connections go on.

        Raises:
            Conflict: it is paused. NotFound: there is none. StoreFull, StoreFault, HostFault: as `pause`,
                or it could not be started again, and is paused there.
        """
        return await self._refreshing.refresh(sandbox_id)

    async def rollback(self, sandbox_id: str, snapshot_id: str | None = None) -> Answer:
        """Put a sandbox back to one of its checkpoints, or to its start: same id, address and token.

        Raises:
            NotFound: the snapshot is not one of its own. StoreCorrupt: it cannot be used; all is as it
                was. GuestFault, HostFault, StoreFault: it could not be started, and is paused there.
        """
        return await self._resuming.rollback(sandbox_id, snapshot_id)

    async def fork(
        self, sandbox_id: str, count: int = 1, timeout_s: int | None = None, children: Sequence[Child] = ()
    ) -> Results:
        """`count` new sandboxes that go on from where this one is, each with its own result. They live
        `timeout_s` seconds, or as long as it has left.

        Raises:
            InvalidRequest: `count` is not 1 to 100. CapacityExceeded: there is no room for them all.
            NotFound, Conflict, StoreFull, StoreFault, HostFault: as `checkpoint`.
        """
        return await self._forking.fork(sandbox_id, count, timeout_s, children)

    def delete_snapshot(self, name_or_id: str) -> bool:
        """Delete a checkpoint; False when there is none of that id or name. What runs from it goes on."""
        found = self.snapshots.find(name_or_id)
        if found is None or found.kind != "checkpoint":
            return False
        deleted = self.snapshots.delete(found.id)
        self._core.collect_soon()
        return deleted

    def template_deleted(self, template_id: str) -> None:
        """Delete the snapshots that were made for starting from a template."""
        for record in self.snapshots.of_kinds(FIRST_KINDS):
            if record.template.id == template_id:
                self.snapshots.delete(record.id)
        self._core.collect_soon()

    def tend(self, snapshot_id: str) -> None:
        """See in the background what is to be done for a snapshot that is new."""
        self._core.tend(snapshot_id)

    def collect_soon(self) -> None:
        """Clear away, by and by, the files of snapshots that nobody refers to."""
        self._core.collect_soon()

    async def flatten(self, snapshot_id: str) -> None:
        """Give a snapshot that many will start from a flat memory file now.

        Raises:
            StoreCorrupt, StoreFull, StoreFault, HostFault: it is as it was.
        """
        if self._core.upkeep is not None:
            await self._core.upkeep.flatten(snapshot_id)

    def drop_outdated(self) -> None:
        """Delete first snapshots of templates that are gone or were built anew, and those of images and of
        other sizes that nobody used for long."""
        for record in self.snapshots.of_kinds(FIRST_KINDS):
            build_id = record.template.build_id
            if not build_id.startswith(IMAGE) and not self._templates.serves(build_id):
                self.snapshots.delete(record.id)
        self.prepared.trim()
        self._core.collect_soon()

    # Time

    def _expire(self, sandbox_id: str) -> None:
        self._core.spawn(self._expire_now(sandbox_id), f"expire {sandbox_id}")

    async def _expire_now(self, sandbox_id: str) -> None:
        core = self._core
        live = core.all.find(sandbox_id)
        if live is None:
            return
        record = live.record
        if record.state in ENDS and not live.busy:
            await _logged(live.begin(core.release(live), "release"))
        elif record.state is State.PAUSED and live.machine is not None and not live.busy:
            self._pausing.tidy(live)
        elif record.state is State.RUNNING and record.lifecycle.on_timeout == "pause":
            await self._pause_expired(sandbox_id, record)
        else:
            await self._ending.expire(sandbox_id, self._expiries)

    async def _pause_expired(self, sandbox_id: str, record: Sandbox) -> None:
        async with self._expiries:
            try:
                memory = record.lifecycle.pause_memory
                await asyncio.shield(self._pausing.pause(sandbox_id, memory=memory, expired=True))
            except AenvError as error:  # nobody waits for it; if it runs on, it is tried again
                log.warning("sandbox %s is not paused at its end: %s", sandbox_id, error)


async def _logged(operation: asyncio.Task[Any]) -> None:
    try:
        await outcome(operation)
    except AenvError:
        pass  # logged where it ended, and tried again


async def _cut_off(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
