"""Killing sandboxes, and what happens when their time runs out."""

from __future__ import annotations

import asyncio
import logging

from agentenv.errors import AenvError, NotFound
from agentenv.sandbox.core import EXPIRED, Core, outcome
from agentenv.sandbox.live import Live
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.transitions import Join, Operation, State

log = logging.getLogger(__name__)


class Ending:
    """Kills."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def kill(self, sandbox_id: str, why: str = "killed") -> Phases:
        """See Sandboxes.kill."""
        return await outcome(await self.begin(sandbox_id, why, None))

    async def begin(self, sandbox_id: str, why: str, bound: asyncio.Semaphore | None) -> asyncio.Task[Phases]:
        """Begin a kill, or join one; returned is what to wait for."""
        live, verdict = await self._core.turn(sandbox_id, Operation.KILL)
        if isinstance(verdict, Join) and live.operation is not None:
            return live.operation
        return self.enter(live, why, bound)

    def enter(self, live: Live, why: str, bound: asyncio.Semaphore | None) -> asyncio.Task[Phases]:
        """Begin the kill of a sandbox whose turn it is."""
        if live.record.state is not State.KILLING:
            reached = live.record.state is not State.PAUSED
            self._core.all.commit_leaving(live, State.KILLING, why)
            if reached:
                self._core.leave(live)
            else:
                self._core.expiry.drop(live.record.id)
        return live.begin(self._kill(live, bound), "kill")

    async def _kill(self, live: Live, bound: asyncio.Semaphore | None) -> Phases:
        core = self._core
        phases = Phases("kill", live.record.id)
        if bound is not None:
            await bound.acquire()
        try:
            with phases("release"):
                await core.release(live)
        finally:
            if bound is not None:
                bound.release()
        core.finish(phases)
        log.info("sandbox %s: %s, released after %s", live.record.id, live.record.reason, phases)
        return phases

    async def expire(self, sandbox_id: str, bound: asyncio.Semaphore) -> None:
        """End a sandbox whose time ran out, as far as a pause is not what was wished."""
        try:
            await asyncio.shield(await self.begin(sandbox_id, EXPIRED, bound))
        except NotFound:
            pass
        except AenvError as error:  # nobody waits for an expiry: it is tried again
            log.warning("sandbox %s could not be ended yet: %s", sandbox_id, error)
            self._core.retry_later(sandbox_id)
