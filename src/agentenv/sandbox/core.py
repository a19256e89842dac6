"""What all operations on sandboxes share: the registry, the parts below, the end of things, and time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from agentenv.config import Settings
from agentenv.errors import AenvError, StoreFault
from agentenv.identity.quotas import no_quota, require_room
from agentenv.identity.records import Quota
from agentenv.sandbox.admission import Admission, Need
from agentenv.sandbox.expiry import Expiry
from agentenv.sandbox.launch import Launcher
from agentenv.sandbox.live import Live
from agentenv.sandbox.observing import Change, Happening, Observers
from agentenv.sandbox.parts import Clock
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.records import Records, Sandbox
from agentenv.sandbox.registry import Registry
from agentenv.sandbox.requests import Stopping
from agentenv.sandbox.transitions import ENDS, Enter, Join, Operation, Outcome, State, Stay, settle
from agentenv.snapshot.store import Snapshots
from agentenv.snapshot.upkeep import Upkeep
from agentenv.vmm.machine import Exit, Machine

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 5.0
COLLECT_AFTER_S = 10.0
EXPIRED = "its time-to-live ran out"
IO_ERROR = "BLOCK_IO_ERROR"  # as QEMU names it
KEEP_CLAIMS_S = 24 * 3600.0
KEEP_ENDED_S = 24 * 3600.0
PRUNE_EVERY_S = 3600.0
KEEP_PHASES = 1000

# Snapshots of these kinds are nobody's to see: they go with the sandbox that needs them.
OWN_KINDS = ("pause", "fork")

GenerationEnd = Callable[[str, int], None]


class Core:
    """The sandboxes of a node and what is under them; each operation is a module over this."""

    def __init__(
        self,
        settings: Settings,
        records: Records,
        launcher: Launcher,
        snapshots: Snapshots,
        clock: Clock,
        act: Callable[[str], None],
        *,
        admission: Admission,
        boot_id: str,
        turn_limit_s: float,
        upkeep: Upkeep | None = None,
        quota_of: Callable[[str | None], Quota] = no_quota,
    ) -> None:
        self.upkeep = upkeep
        self.quota_of = quota_of
        self.admission = admission
        self.settings = settings
        self.launcher = launcher
        self.snapshots = snapshots
        self.clock = clock
        self.boot_id = boot_id
        self.observers = Observers()
        self.all = Registry(records, self.observers.ended)
        self.expiry = Expiry(clock, act)
        self.listeners: list[GenerationEnd] = []
        self.stopping = False
        self.recent: deque[Phases] = deque(maxlen=KEEP_PHASES)
        self.background: set[asyncio.Task[Any]] = set()
        self._turn_limit_s = turn_limit_s
        self._pruned_at = 0.0
        self._cancel_collection: Callable[[], None] | None = None

    # Asking

    def refuse_when_stopping(self) -> None:
        """Raise Stopping when nothing new is begun any more."""
        if self.stopping:
            raise Stopping("the node is stopping", retry_after=10)

    async def turn(self, sandbox_id: str, operation: Operation) -> tuple[Live, Enter | Stay | Join]:
        """See Registry.turn."""
        return await self.all.turn(sandbox_id, operation, self._turn_limit_s)

    def admit(self, record: Sandbox) -> None:
        """Hold what a sandbox with a machine takes of the node, from now on.

        Raises:
            CapacityExceeded: there is no room for it. InvalidRequest: there never will be.
            QuotaExceeded: the key that made it has as many as it may.
        """
        self.require_quota(record)
        self.admission.reserve(record.id, need_of(record))

    def require_quota(self, record: Sandbox) -> None:
        """Raise QuotaExceeded where a sandbox with a machine would be more than its key may have."""
        if quota := self.quota_of(record.key):
            others = [
                _taken(live.record)
                for live in self.all
                if live.record.key == record.key and live.record.id != record.id
            ]
            wanted = Quota(1, record.vcpus, record.memory_mib, record.written_mib)
            require_room(quota, others, wanted)

    def count(self, record: Sandbox) -> None:
        """Hold what a sandbox takes in its present state: it is there, whether there is room or not."""
        paused = record.state is State.PAUSED
        need = Need.paused(disk_mib=record.written_mib) if paused else need_of(record)
        self.admission.adopt(record.id, need)

    # Committing

    def commit(self, live: Live, record: Sandbox) -> None:
        """Change a sandbox's record, and hold the snapshots that it names now.

        Raises:
            StoreFault: it could not be written; the sandbox is as it was.
        """
        self.all.commit(live, record)
        self.hold(live)

    def commit_anyway(self, live: Live, record: Sandbox) -> None:
        """The same where there is no way back: a store that refuses is logged, and tried again."""
        self.all.commit_anyway(live, record)
        self.hold(live)
        if self.all.owes:
            self.collect_soon()

    def commit_failed(self, live: Live, outcome: Outcome, reason: str) -> None:
        """Record a sandbox's end by failure."""
        self.all.commit_end(live, settle(outcome, live.record.state), reason, self.clock.now())
        self.tell(Change.FAILED, live.record, reason=reason)

    def hold(self, live: Live, *, changed: str | None = None) -> None:
        """Keep the files of the snapshots that a sandbox stands on and was born from, and those that its
        machine runs from, which may be others by now. `changed` is a snapshot to be kept anew."""
        machine = live.machine
        used = self.snapshots.names_of(machine.stands_on) if machine is not None else ()
        for role, snapshot_id, extra in (
            ("snapshot", live.record.snapshot, used),
            ("start", live.record.start, ()),
        ):
            held = live.holds.get(role)
            same = held is not None and held.record.id == snapshot_id != changed
            if held is not None and same and held.files.issuperset(extra):
                continue
            found = None if snapshot_id is None else self.snapshots.recorded(snapshot_id)
            live.keep(role, None if found is None else self.snapshots.keep(found, *extra))

    def snapshot_changed(self, snapshot_id: str) -> None:
        """A snapshot has other files than before: keep those, and not what nobody needs any more. Who is
        about to start from the ones before goes on to keep them."""
        for live in self.all:
            if not live.busy and snapshot_id in (live.record.snapshot, live.record.start):
                self.hold(live, changed=snapshot_id)
        self.collect_soon()

    def starts_of(self, snapshot_id: str) -> int:
        """How many sandboxes there are that were started from a snapshot."""
        return sum(live.record.start == snapshot_id for live in self.all)

    def tend(self, snapshot_id: str) -> None:
        """A snapshot is new, or was started from: see in the background what is to be done for it."""
        if self.upkeep is not None:
            self.upkeep.look(snapshot_id)

    def set_end(self, live: Live, end_at: float) -> None:
        """Let a running sandbox's time end then."""
        if end_at != live.record.end_at:
            self.commit(live, replace(live.record, end_at=end_at))
            self.expiry.set(live.record.id, end_at)
            self.tell(Change.UPDATED, live.record, what="end")

    # Machines

    def watch(self, live: Live) -> None:
        """See a machine's end, whoever causes it."""
        machine = live.machine
        assert machine is not None
        sandbox_id = live.record.id
        self.admission.commit(sandbox_id)

        def note(event: str, data: dict[str, object]) -> None:
            expected = live.machine is not machine or live.busy  # an operation stops it, and lets it go on
            level = logging.DEBUG if expected else logging.WARNING
            log.log(level, "sandbox %s: machine event %s %s", sandbox_id, event, data)
            if event == IO_ERROR and data.get("action") == "stop" and live.machine is machine:
                self._stall(live, machine, str(data.get("reason", "a disk error")))

        live.stalled = None
        machine.on_event(note)
        machine.on_console(partial(self.observers.wrote, sandbox_id))
        live.watch = asyncio.create_task(self._until_exit(live), name=f"watch {sandbox_id}")

    def _stall(self, live: Live, machine: Machine, reason: str) -> None:
        """The hypervisor has stopped a machine that could not write to its disk: nobody is left hanging,
        and it goes on when there is space."""
        if live.stalled is not None:
            return
        live.stalled = reason
        log.error("sandbox %s is stopped, its disk cannot be written: %s", live.record.id, reason)
        self.tell(Change.STALLED, live.record, reason=reason)
        for listener in self.listeners:
            listener(live.record.id, live.record.generation)
        self._go_on_later(live, machine)

    def _go_on_later(self, live: Live, machine: Machine) -> None:
        self.clock.call_later(RETRY_S, lambda: self.spawn(self._go_on(live, machine), "go on"))

    async def _go_on(self, live: Live, machine: Machine) -> None:
        if live.machine is not machine or live.stalled is None or machine.exited:
            return
        if live.busy:  # which ends it, or has let it run already, perhaps before it stalled
            self._go_on_later(live, machine)
            return
        reason, live.stalled = live.stalled, None
        try:
            await machine.run()  # if it fails to write again, its event says so again
        except AenvError as error:
            log.warning("sandbox %s does not go on yet: %s", live.record.id, error)
            self._stall(live, machine, reason)

    def watch_adopted(self, live: Live) -> None:
        """The same for a machine that ran before it was watched: it may have stalled again meanwhile. To run
        it once more tells, and changes nothing where it runs."""
        self.watch(live)
        if live.machine is not None:
            self.spawn(self._run_again(live, live.machine), f"run {live.record.id}")

    async def _run_again(self, live: Live, machine: Machine) -> None:
        if live.busy or live.machine is not machine or machine.exited:
            return
        try:
            await machine.run()
        except AenvError as error:  # its end is seen by the watch
            log.warning("sandbox %s: %s", live.record.id, error)

    def unwatch(self, live: Live) -> None:
        """A machine's end is none of the watch's business any more."""
        if live.watch is not None:
            live.watch.cancel()
            live.watch = None

    async def _until_exit(self, live: Live) -> None:
        assert live.machine is not None
        ended = await live.machine.wait()
        while live.operation is not None:  # it sees the exit itself
            await asyncio.wait({live.operation})
        if live.record.state is State.RUNNING:
            live.begin(self.fail(live, exit_reason(ended)), "release")

    async def fail(self, live: Live, reason: str) -> None:
        """The end of a sandbox whose machine ended by itself."""
        log.warning("sandbox %s failed: %s", live.record.id, reason)
        self.commit_failed(live, Outcome.DIED, reason)
        self.leave(live)
        await self.release(live)

    async def lose(self, live: Live, reason: str) -> None:
        """The end of a sandbox whose operation left nothing to go on with."""
        log.warning("sandbox %s failed: %s", live.record.id, reason)
        self.commit_failed(live, Outcome.LOST, reason)
        self.leave(live)
        try:
            await self.release(live)
        except AenvError as error:  # it is tried again; the caller hears what went wrong first
            log.warning("sandbox %s could not be released yet: %s", live.record.id, error)

    def leave(self, live: Live) -> None:
        """The present generation is given up: no expiry, and an end to connections."""
        self.expiry.drop(live.record.id)
        for listener in self.listeners:
            listener(live.record.id, live.record.generation)

    async def release(self, live: Live) -> None:
        """Release all that a sandbox has, and forget it. What fails is tried again later."""
        try:
            await self.launcher.release(live)
        except BaseException:
            self.retry_later(live.record.id)
            raise
        if live.record.state not in ENDS:
            end = settle(Outcome.DONE, live.record.state)
            reason = live.record.reason or "killed"
            self.all.commit_end(live, end, reason, self.clock.now())
            self.tell(Change.EXPIRED if reason == EXPIRED else Change.KILLED, live.record, reason=reason)
        self.all.remove(live)
        self.admission.release(live.record.id)
        self.expiry.drop(live.record.id)
        self.unwatch(live)
        self.discard(live.record.snapshot)
        live.let_go()
        self.collect_soon()

    def retry_later(self, sandbox_id: str) -> None:
        """Have the expiry look at a sandbox again soon."""
        if self.all.find(sandbox_id) is not None:
            self.expiry.set(sandbox_id, self.clock.now() + RETRY_S)

    # Snapshots that nobody needs any more

    def discard(self, snapshot_id: str | None) -> None:
        """Delete a snapshot if it is one that only its sandbox needed. Who still runs from it holds it."""
        record = None if snapshot_id is None else self.snapshots.recorded(snapshot_id)
        if record is None or record.kind not in OWN_KINDS or record.deleted_at is not None:
            return
        try:
            self.snapshots.delete(record.id)
        except StoreFault as error:  # the next start finds it
            log.warning("snapshot %s is not deleted yet: %s", record.id, error)
        self.collect_soon()

    def collect_soon(self) -> None:
        """Clear away what nobody refers to, by and by."""
        if self._cancel_collection is None and not self.stopping:
            self._cancel_collection = self.clock.call_later(COLLECT_AFTER_S, self._begin_collection)

    def stop_collecting(self) -> None:
        """Begin no collection from now on."""
        if self._cancel_collection is not None:
            self._cancel_collection()
            self._cancel_collection = None

    def _begin_collection(self) -> None:
        self._cancel_collection = None
        self.spawn(self._collect(), "collect snapshots")

    async def _collect(self) -> None:
        try:
            self.all.write_owed()
            found = await self.snapshots.collect()
        except AenvError as error:  # nobody waits for it
            log.warning("snapshots that nobody needs are not removed yet: %s", error)
            self.collect_soon()
            return
        if found.files:
            log.info("removed %d files of snapshots, %d bytes", len(found.files), found.bytes)

    # Small change

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Do something beside; the end of the node cuts it off."""
        task = asyncio.create_task(work, name=name)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    def finish(self, phases: Phases) -> None:
        """An operation is over."""
        phases.finish()
        self.recent.append(phases)
        self.observers.finished(phases)

    def tell(self, change: Change, record: Sandbox, **detail: str) -> None:
        """Say to those who watch that something has happened to a sandbox."""
        self.observers.happened(Happening(change, record, self.clock.now(), detail))

    def prune(self) -> None:
        """Forget old keys and ended sandboxes, from time to time."""
        now = self.clock.now()
        if now - self._pruned_at >= PRUNE_EVERY_S:
            self._pruned_at = now
            self.all.records.prune(ended_before=now - KEEP_ENDED_S, claims_before=now - KEEP_CLAIMS_S)


def need_of(record: Sandbox) -> Need:
    """What a sandbox with a machine takes of the node."""
    return Need.running(vcpus=record.vcpus, memory_mib=record.memory_mib, disk_mib=record.written_mib)


def _taken(record: Sandbox) -> Quota:
    """What a sandbox takes of its key's quota."""
    if record.state is State.PAUSED:
        return Quota(1, 0, 0, record.written_mib)
    return Quota(1, record.vcpus, record.memory_mib, record.written_mib)


async def outcome(operation: asyncio.Task[T]) -> T:
    """The result of an operation, which goes on when the caller is cancelled."""
    try:
        return await asyncio.shield(operation)
    except asyncio.CancelledError:
        if operation.cancelled():
            raise Stopping("the node is stopping", retry_after=10) from None
        raise


def exit_reason(ended: Exit) -> str:
    """How a machine ended, as the reason of its sandbox's end."""
    words = {
        "ended": "its machine was ended by something else than this node",
        "shutdown": "the guest shut itself down",
        "crashed": "its machine crashed",
    }
    status = "" if ended.status is None else f" (status {ended.status})"
    return words[ended.reason] + status + (f": {ended.detail}" if ended.detail else "")
