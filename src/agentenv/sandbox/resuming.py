"""Resuming: from the snapshot that a sandbox was paused into, or in a rollback from another of its own."""

from __future__ import annotations

import logging

from agentenv.errors import AenvError, Conflict, NotFound
from agentenv.sandbox.agent import cause
from agentenv.sandbox.core import Core, outcome
from agentenv.sandbox.launch import identity_after
from agentenv.sandbox.live import Live
from agentenv.sandbox.observing import Change
from agentenv.sandbox.pausing import awake, set_paused_end
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.requests import Answer
from agentenv.sandbox.transitions import Enter, Operation, Outcome, State, settle
from agentenv.snapshot.records import Snapshot

log = logging.getLogger(__name__)


class Resuming:
    """Resumes and rollbacks."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def connect(
        self, sandbox_id: str, timeout_s: int, *, memory: bool = True, must_be_paused: bool = False
    ) -> Answer:
        """See Sandboxes.connect and Sandboxes.resume."""
        core = self._core
        live, verdict = await core.turn(sandbox_id, Operation.CONNECT)
        if not isinstance(verdict, Enter):
            if must_be_paused:
                raise Conflict(f'Sandbox "{sandbox_id}" is already running')
            core.set_end(live, max(live.record.end_at, core.clock.now() + timeout_s))
            return Answer(live.record)
        core.refuse_when_stopping()
        snapshot = self._paused_into(live)
        core.admit(live.record)
        try:
            core.commit(live, live.record.with_state(State.RESUMING))
        except BaseException:
            core.count(live.record)
            raise
        core.expiry.drop(sandbox_id)
        return await outcome(live.begin(self._resume(live, snapshot, timeout_s, memory, "resume"), "resume"))

    async def rollback(self, sandbox_id: str, snapshot_id: str | None) -> Answer:
        """See Sandboxes.rollback."""
        core = self._core
        core.refuse_when_stopping()
        live, _ = await core.turn(sandbox_id, Operation.ROLLBACK)
        snapshot = self._own(live, snapshot_id)
        core.snapshots.require_files(snapshot)
        before = live.record
        paused = before.state is State.PAUSED
        left_s = before.timeout_s if paused else max(1.0, before.end_at - core.clock.now())
        core.admit(before)
        try:
            core.commit(live, before.with_state(State.RESUMING, snapshot=snapshot.id, pause_mode=None))
        except BaseException:
            core.count(live.record)
            raise
        core.expiry.drop(sandbox_id)
        core.discard(before.snapshot)
        if not paused:
            core.unwatch(live)
            core.leave(live)
        work = self._resume(live, snapshot, left_s, True, "rollback")
        return await outcome(live.begin(work, "rollback"))

    async def _resume(
        self, live: Live, snapshot: Snapshot, timeout_s: float, memory: bool, name: str
    ) -> Answer:
        core = self._core
        phases = Phases(name, live.record.id)
        generation = live.record.generation + 1
        try:
            if live.machine is not None:
                with phases("end"):
                    await core.launcher.end_machine(live)
            identity = identity_after(live.record, snapshot, memory=memory)
            await core.launcher.launch(
                live, snapshot, identity, phases, lambda record: core.commit(live, record), memory=memory
            )
            end_at = core.clock.now() + timeout_s
            state = settle(Outcome.DONE, live.record.state)
            running = awake(live.record).with_state(
                state, generation=generation, end_at=end_at, boot_id=core.boot_id
            )
            core.commit(live, running)
        except BaseException as error:
            await self.undo(live, error)
            raise
        core.watch(live)
        core.expiry.set(live.record.id, live.record.end_at)
        core.discard(snapshot.id)
        core.finish(phases)
        change = Change.ROLLED_BACK if name == "rollback" else Change.RESUMED
        core.tell(change, live.record, snapshot=snapshot.id)
        log.info("sandbox %s runs again after %s", live.record.id, phases)
        return Answer(live.record, phases, resumed=True)

    async def undo(self, live: Live, error: BaseException) -> None:
        """Paused as before, with the reason."""
        core = self._core
        reason = f"it could not be resumed: {cause(error)}"
        state = settle(Outcome.UNDONE, live.record.state)
        mode = live.record.pause_mode or "full"
        until = live.record.paused_until or live.record.kept_until(core.clock.now())
        core.commit_anyway(
            live, live.record.with_state(state, reason=reason, pause_mode=mode, paused_until=until)
        )
        try:
            await core.launcher.release(live)
        except AenvError as second:  # it is tried again; the caller hears what went wrong first
            log.warning("sandbox %s could not be released yet: %s", live.record.id, second)
            core.retry_later(live.record.id)
        else:
            core.count(live.record)
            set_paused_end(core, live)
        log.warning("sandbox %s stays paused: %s", live.record.id, reason)
        core.tell(Change.RESUME_FAILED, live.record, reason=reason)

    def _paused_into(self, live: Live) -> Snapshot:
        name = live.record.snapshot
        found = None if name is None else self._core.snapshots.recorded(name)
        if found is None:
            raise NotFound(f'the snapshot that sandbox "{live.record.id}" was paused into is gone')
        return found

    def _own(self, live: Live, snapshot_id: str | None) -> Snapshot:
        """One of a sandbox's own checkpoints, or what it was born from."""
        record, snapshots = live.record, self._core.snapshots
        if snapshot_id is None or snapshot_id == record.start:
            found = None if record.start is None else snapshots.recorded(record.start)
            if found is None:
                raise NotFound(f'what sandbox "{record.id}" was started from is gone')
            return found
        found = snapshots.get(snapshot_id)
        if found.sandbox_id != record.id or found.kind != "checkpoint":
            raise NotFound(
                f'snapshot "{snapshot_id}" is not one of sandbox "{record.id}"',
                remedy="a sandbox goes back to its own checkpoints, or to its start",
            )
        return found
