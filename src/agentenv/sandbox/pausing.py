"""Pausing: the machine becomes a snapshot, and nothing else of the sandbox is left on the host."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace

from agentenv.errors import AenvError, GuestFault, NotFound
from agentenv.sandbox.agent import cause
from agentenv.sandbox.capture import capture, snapshot_of, undo
from agentenv.sandbox.core import EXPIRED, RETRY_S, Core, outcome
from agentenv.sandbox.freezing import at_rest
from agentenv.sandbox.live import Live
from agentenv.sandbox.observing import Change
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.records import Sandbox
from agentenv.sandbox.transitions import Join, Operation, Outcome, State, settle
from agentenv.snapshot.draft import Draft

log = logging.getLogger(__name__)

AGENT_LIMIT_S = 5.0
RETRY_MOST_S = 300.0


class GuestUnresponsive(GuestFault):
    """The agent does not answer, so what depends on it was not done; the sandbox runs on."""

    status = 503
    code = "guest_unresponsive"
    e2b_code = "sandbox_snapshot_guest_agent_unresponsive"


class Pausing:
    """Pauses."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def pause(
        self, sandbox_id: str, *, memory: bool = True, healthy: bool = False, expired: bool = False
    ) -> Phases:
        """See Sandboxes.pause. With `expired` it is paused whether its agent answers or not."""
        core = self._core
        core.refuse_when_stopping()
        live, verdict = await core.turn(sandbox_id, Operation.PAUSE)
        if isinstance(verdict, Join) and live.operation is not None:
            joined: asyncio.Task[Phases] = live.operation
            return await outcome(joined)
        return await outcome(self.enter(live, memory=memory, healthy=healthy, expired=expired))

    def enter(
        self, live: Live, *, memory: bool, healthy: bool = False, expired: bool = False
    ) -> asyncio.Task[Phases]:
        """Begin the pause of a sandbox whose turn it is.

        Raises:
            StoreFull, StoreFault: it cannot even be begun.
        """
        core = self._core
        draft = core.snapshots.begin(live.record.id)
        try:
            core.commit(live, live.record.with_state(State.PAUSING, target=draft.id))
        except BaseException:
            core.spawn(core.snapshots.abandon(draft), f"abandon {draft.id}")
            raise
        return live.begin(self._pause(live, draft, memory, healthy, expired), "pause")

    async def _pause(self, live: Live, draft: Draft, memory: bool, healthy: bool, expired: bool) -> Phases:
        core = self._core
        phases = Phases("pause", live.record.id)
        core.expiry.drop(live.record.id)
        try:
            async with AsyncExitStack() as rest:
                answered = await self._ask_agent(live, memory, healthy, expired, phases, rest)
                contents = await capture(live, draft, core.snapshots, phases, final=True, memory=memory)
            now = core.clock.now()
            record = snapshot_of(
                live.record, draft, contents, core.snapshots, kind="pause", now=now, memory=memory
            )
            with phases("publish"):
                await core.snapshots.publish(draft, record, durable=core.settings.pause_durable)
        except BaseException as error:
            await self._undo(live, draft, error)
            raise
        self._commit_paused(live, draft.id, memory, answered)
        live.follow(self._tidy(live), "tidy")
        core.finish(phases)
        expiry = {"reason": EXPIRED} if expired else {}
        core.tell(Change.PAUSED, live.record, snapshot=draft.id, **expiry)
        log.info("sandbox %s is paused after %s", live.record.id, phases)
        return phases

    async def _ask_agent(
        self, live: Live, memory: bool, healthy: bool, expired: bool, phases: Phases, rest: AsyncExitStack
    ) -> bool:
        """Have the guest's disk at rest, until `rest` ends, where only that is kept; returns whether the
        agent answered."""
        if memory and not healthy and not expired:
            return True
        try:
            if memory:
                await self._require_answer(live, phases)
            else:
                await rest.enter_async_context(at_rest(self._core, live, phases))
        except (GuestFault, OSError, TimeoutError) as error:
            if expired:  # its time is up all the same
                log.warning(
                    "sandbox %s is paused although its agent does not answer: %s",
                    live.record.id,
                    cause(error),
                )
                return False
            raise GuestUnresponsive(
                f'the agent of sandbox "{live.record.id}" does not answer, it runs on: {cause(error)}'
            ) from error
        return True

    async def _require_answer(self, live: Live, phases: Phases) -> None:
        assert live.slot is not None
        agent = self._core.launcher.agent_at(live.slot.address)
        try:
            async with asyncio.timeout(AGENT_LIMIT_S):
                with phases("agent"):
                    await agent.health()
        finally:
            await agent.close()

    def _commit_paused(self, live: Live, snapshot_id: str, memory: bool, answered: bool) -> None:
        core, before = self._core, live.record
        now = core.clock.now()
        state = settle(Outcome.DONE, before.state)
        core.unwatch(live)
        live.failed_pauses = 0
        # The snapshot is on record: whether this is written or not, the next start finds it paused.
        core.commit_anyway(
            live,
            before.with_state(
                state,
                snapshot=snapshot_id,
                target=None,
                pause_mode="full" if memory else "filesystem",
                agent_answered=answered,
                paused_until=before.kept_until(now),
                end_at=now,
                reason=None,
            ),
        )
        core.leave(live)
        core.discard(before.snapshot)
        core.tend(snapshot_id)
        if not core.settings.pause_durable:
            core.spawn(self._make_durable(snapshot_id), f"sync {snapshot_id}")

    async def _make_durable(self, snapshot_id: str) -> None:
        try:
            await self._core.snapshots.make_durable(snapshot_id)
        except NotFound:
            pass  # resumed and gone by now
        except AenvError as error:  # the pause stands all the same, as long as the host does
            log.warning("snapshot %s is not synced: %s", snapshot_id, error)

    async def _tidy(self, live: Live) -> None:
        """End what a paused sandbox has no more use for; tried again when it fails."""
        core, sandbox_id = self._core, live.record.id
        try:
            await core.launcher.release(live)
        except AenvError as error:
            log.warning("the machine of paused sandbox %s is not released yet: %s", sandbox_id, error)
            core.retry_later(sandbox_id)
            return
        core.count(live.record)
        core.hold(live, changed=live.record.snapshot)  # and not what the machine stood on besides
        set_paused_end(core, live)

    def tidy(self, live: Live) -> None:
        """Try again to end what is left of a paused sandbox's machine."""
        live.begin(self._tidy(live), "tidy")

    async def _undo(self, live: Live, draft: Draft, error: BaseException) -> None:
        """Let the sandbox run on, and try again later if its time is up by then."""
        core = self._core
        if not await undo(core, live, draft, error, stopped=True, done="paused", change=Change.PAUSE_FAILED):
            return
        pause_s = min(RETRY_S * 2**live.failed_pauses, RETRY_MOST_S)
        live.failed_pauses += 1
        core.expiry.set(live.record.id, max(live.record.end_at, core.clock.now() + pause_s))


def set_paused_end(core: Core, live: Live) -> None:
    """Have a paused sandbox's own time run."""
    if live.record.paused_until is None:
        core.expiry.drop(live.record.id)
    else:
        core.expiry.set(live.record.id, live.record.paused_until)


def awake(record: Sandbox) -> Sandbox:
    """A record without what only a paused sandbox has."""
    return replace(record, pause_mode=None, paused_until=None, agent_answered=True, reason=None)
