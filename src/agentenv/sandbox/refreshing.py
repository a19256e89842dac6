"""Refreshing: a sandbox gives back the memory that it has changed, and goes on where it is.

A machine holds each page that it has written for itself, for good. It is captured, what was captured
becomes a flat file while it runs on, and then it starts anew from that: all pages are the file's again, to
be shared by those that start from it too, and to be dropped and read anew by the host as it likes. The
second capture, of what was written meanwhile, and the start are what the guest stands still for. Its
connections go on: address, slot and generation stay, and its network sees some lost packets.
"""

from __future__ import annotations

import logging

from agentenv.sandbox.agent import Identity
from agentenv.sandbox.capture import capture, snapshot_of, undo
from agentenv.sandbox.checkpointing import Checkpointing
from agentenv.sandbox.core import Core, outcome
from agentenv.sandbox.live import Live
from agentenv.sandbox.observing import Change
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.resuming import Resuming
from agentenv.sandbox.transitions import Enter, Operation, Outcome, decide, settle
from agentenv.snapshot.draft import Draft
from agentenv.snapshot.records import Snapshot

log = logging.getLogger(__name__)


class Refreshing:
    """Refreshes."""

    def __init__(self, core: Core, checkpointing: Checkpointing, resuming: Resuming) -> None:
        self._core = core
        self._checkpointing = checkpointing
        self._resuming = resuming

    async def refresh(self, sandbox_id: str) -> Phases:
        """See Sandboxes.refresh_memory."""
        core = self._core
        async with self._checkpointing.passing(sandbox_id, Operation.REFRESH) as (first, _):
            if core.upkeep is not None:
                await core.upkeep.flatten(first.id)
            core.refuse_when_stopping()
            live, verdict = await core.turn(sandbox_id, Operation.REFRESH)
            assert isinstance(verdict, Enter)
            draft = core.snapshots.begin(sandbox_id)
            try:
                core.commit(live, live.record.with_state(verdict.state, target=draft.id))
            except BaseException:
                await core.snapshots.abandon(draft)
                raise
            return await outcome(live.begin(self._refresh(live, draft), "refresh"))

    async def _refresh(self, live: Live, draft: Draft) -> Phases:
        core = self._core
        phases = Phases("refresh", live.record.id)
        try:
            made = await self._capture(live, draft, phases)
        except BaseException as error:
            core.discard(draft.id)
            await undo(core, live, draft, error, stopped=True, done="captured")
            raise
        core.unwatch(live)
        try:
            await self._start_anew(live, made, phases)
        except BaseException as error:
            core.leave(live)  # now its connections end
            await self._resuming.undo(live, error)
            raise
        core.watch(live)
        core.hold(live, changed=made.id)  # and not what the machine before stood on
        core.discard(made.id)
        core.finish(phases)
        core.tell(Change.REFRESHED, live.record)
        log.info("sandbox %s has its memory from a file again after %s", live.record.id, phases)
        return phases

    async def _capture(self, live: Live, draft: Draft, phases: Phases) -> Snapshot:
        core, snapshots = self._core, self._core.snapshots
        contents = await capture(live, draft, snapshots, phases, final=False)
        record = snapshot_of(live.record, draft, contents, snapshots, kind="pause", now=core.clock.now())
        with phases("publish"):
            made = await snapshots.publish(draft, record)
        following = decide(Operation.ROLLBACK, settle(Outcome.DONE, live.record.state))
        assert isinstance(following, Enter)
        core.commit(live, live.record.with_state(following.state, snapshot=made.id, target=None))
        return made

    async def _start_anew(self, live: Live, made: Snapshot, phases: Phases) -> None:
        core = self._core
        with phases("end"):
            await core.launcher.end_machine(live)
        await core.launcher.launch(
            live, made, Identity(same_peers=True), phases, lambda record: core.commit(live, record)
        )
        state = settle(Outcome.DONE, live.record.state)
        core.commit(live, live.record.with_state(state, boot_id=core.boot_id))
