"""Limits on sandboxes that are there already: changed, and put in force again by a node that starts."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from agentenv.errors import AenvError
from agentenv.limits import Limits
from agentenv.sandbox.core import Core, outcome
from agentenv.sandbox.live import Live
from agentenv.sandbox.transitions import Operation, State

log = logging.getLogger(__name__)


class Limiting:
    """Changes limits."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def change(self, sandbox_id: str, limits: Limits) -> None:
        """See Sandboxes.set_limits."""
        live, _ = await self._core.turn(sandbox_id, Operation.LIMIT)
        while live.busy:  # another change of limits, which has no state of its own
            assert live.operation is not None
            await asyncio.wait({live.operation})
            live, _ = await self._core.turn(sandbox_id, Operation.LIMIT)
        if live.record.state is State.PAUSED:
            self._core.commit(live, replace(live.record, limits=limits))
        else:
            await outcome(live.begin(self._change(live, limits), "limit"))

    async def enforce_all(self) -> None:
        """Put the limits of all sandboxes in force: a node that died may have been about to."""
        await asyncio.gather(*(self._enforce(live) for live in self._core.all if live.machine is not None))

    async def _change(self, live: Live, limits: Limits) -> None:
        try:
            await self._core.launcher.limit(live, limits)
            self._core.commit(live, replace(live.record, limits=limits))
        except BaseException:
            await self._enforce(live)
            raise

    async def _enforce(self, live: Live) -> None:
        try:
            await self._core.launcher.limit(live, live.record.limits)
        except AenvError as error:  # the sandbox is worth more than its limits
            log.warning("the limits of sandbox %s are not in force: %s", live.record.id, error)
