"""Checkpoints: a snapshot of a sandbox that runs on, kept until somebody deletes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

from agentenv.errors import InvalidRequest
from agentenv.sandbox.capture import capture, parent_of, run_on, snapshot_of, undo
from agentenv.sandbox.core import Core, outcome
from agentenv.sandbox.freezing import at_rest, write_again
from agentenv.sandbox.live import Live
from agentenv.sandbox.observing import Change
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.transitions import Enter, Operation, Outcome, settle
from agentenv.snapshot.draft import Draft
from agentenv.snapshot.names import canonical
from agentenv.snapshot.records import Kind, Snapshot

log = logging.getLogger(__name__)

Taken = tuple[Snapshot, Phases]


class Checkpointing:
    """Takes snapshots of sandboxes."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def checkpoint(self, sandbox_id: str, name: str | None = None, *, memory: bool = True) -> Taken:
        """See Sandboxes.checkpoint."""
        names = () if name is None else (canonical(name),)
        return await self.take(
            sandbox_id, Operation.CHECKPOINT, "checkpoint", names=names, memory=memory, durable=True
        )

    @asynccontextmanager
    async def passing(self, sandbox_id: str, operation: Operation) -> AsyncIterator[Taken]:
        """A snapshot that is there for the block: what runs from it at the end keeps its files."""
        point, phases = await self.take(sandbox_id, operation, "fork", durable=False)
        hold = self._core.snapshots.keep(point)
        try:
            yield point, phases
        finally:
            hold.release()
            self._core.discard(point.id)

    async def take(
        self,
        sandbox_id: str,
        operation: Operation,
        kind: Kind,
        *,
        names: tuple[str, ...] = (),
        memory: bool = True,
        durable: bool,
    ) -> Taken:
        """A snapshot of a sandbox that runs on, or of one that is paused."""
        core = self._core
        core.refuse_when_stopping()
        live, verdict = await core.turn(sandbox_id, operation)
        if not isinstance(verdict, Enter):
            return await self._of_paused(live, kind, names, memory, durable)
        draft = core.snapshots.begin(sandbox_id)
        try:
            core.commit(live, live.record.with_state(verdict.state, target=draft.id))
        except BaseException:
            await core.snapshots.abandon(draft)
            raise
        taking = live.begin(self._take(live, draft, kind, names, memory, durable), kind)
        try:
            return await outcome(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._discard)
            raise

    def _discard(self, taking: asyncio.Task[Taken]) -> None:
        """Of one whose caller has gone; a checkpoint stays, to be found in the list."""
        if not taking.cancelled() and taking.exception() is None:
            self._core.discard(taking.result()[0].id)

    async def _take(
        self, live: Live, draft: Draft, kind: Kind, names: tuple[str, ...], memory: bool, durable: bool
    ) -> Taken:
        core, snapshots = self._core, self._core.snapshots
        phases = Phases(kind, live.record.id)
        stopped = False
        try:
            async with at_rest(core, live, phases) if not memory else nullcontext() as frozen:
                stopped = True
                contents = await capture(live, draft, snapshots, phases, final=False, memory=memory)
                with phases("run"):
                    await run_on(live)
                stopped = False
                if frozen is not None:
                    await write_again(frozen, live, phases)
            record = snapshot_of(
                live.record, draft, contents, snapshots, kind=kind, now=core.clock.now(),
                memory=memory, names=names,
            )  # fmt: skip
            with phases("publish"):
                made = await snapshots.publish(draft, record, durable=durable)
        except BaseException as error:
            await undo(core, live, draft, error, stopped=stopped, done="captured")
            raise
        state = settle(Outcome.DONE, live.record.state)
        before = live.record.snapshot
        newest = made.id if memory else before
        core.commit_anyway(live, live.record.with_state(state, snapshot=newest, target=None))
        if not memory:  # its layer is below what the machine writes now
            live.keep("disk", snapshots.keep(made))
        core.tend(made.id)
        core.finish(phases)
        self._tell(live, made)
        log.info("sandbox %s: %s %s after %s", live.record.id, kind, made.id, phases)
        return made, phases

    async def _of_paused(
        self, live: Live, kind: Kind, names: tuple[str, ...], memory: bool, durable: bool
    ) -> Taken:
        """A second record over what a sandbox was paused into: nothing is written but that."""
        core, snapshots = self._core, self._core.snapshots
        phases = Phases(kind, live.record.id)
        paused = parent_of(live.record, snapshots)
        if paused is None:
            raise InvalidRequest(f'sandbox "{live.record.id}" has no snapshot that could be kept')
        hold = snapshots.keep(paused)
        draft = snapshots.begin(live.record.id)
        try:
            record = replace(
                paused, id=draft.id, kind=kind, names=names, created_at=core.clock.now(), parent=paused.parent
            )
            if not memory:
                record = replace(record, memory=None, state=None, fingerprint={})
            with phases("publish"):
                made = await snapshots.publish(draft, record, durable=durable)
        except BaseException:
            await snapshots.abandon(draft)
            core.discard(draft.id)  # if it was published, and the caller had gone
            raise
        finally:
            hold.release()
        core.tend(made.id)
        core.finish(phases)
        self._tell(live, made)
        return made, phases

    def _tell(self, live: Live, made: Snapshot) -> None:
        """A fork's point, or a refresh's, is nobody's to see."""
        if made.kind == "checkpoint":
            names = {"names": ", ".join(made.names)} if made.names else {}
            self._core.tell(Change.CHECKPOINTED, live.record, snapshot=made.id, **names)
