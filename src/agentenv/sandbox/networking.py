"""What a sandbox may reach, changed while it is there: E2B's rules of egress, replaced as a whole."""

from __future__ import annotations

import logging
from dataclasses import replace

from agentenv.errors import HostFault
from agentenv.network.slot import Slot
from agentenv.sandbox.core import Core
from agentenv.sandbox.live import Live
from agentenv.sandbox.observing import Change
from agentenv.sandbox.records import Network
from agentenv.sandbox.requests import refuse_unsupported_network
from agentenv.sandbox.transitions import REACHABLE, Operation

log = logging.getLogger(__name__)


class Networking:
    """Changes of network rules."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def replace(self, sandbox_id: str, egress: Network) -> None:
        """See Sandboxes.set_network."""
        refuse_unsupported_network(egress)
        self._core.launcher.slots.check(egress.policy)
        live, _ = await self._core.turn(sandbox_id, Operation.NETWORK)
        async with live.rules:  # the one that is answered last is the one that holds
            live, _ = await self._core.turn(sandbox_id, Operation.NETWORK)
            before = live.record.network
            self._commit(live, before.with_egress(egress))
            await self._apply(live, before)
        self._core.tell(Change.UPDATED, live.record, what="network")
        log.info("sandbox %s: network rules are replaced", sandbox_id)

    async def _apply(self, live: Live, before: Network) -> None:
        """Have what is on record in force; at once, or with its next start where it has none now."""
        while (slot := live.slot) is not None:
            try:
                await self._core.launcher.slots.apply(slot, live.record.network.policy)
                return
            except HostFault:
                if live.record.state in REACHABLE:
                    await self._go_back(live, slot, before)
                    raise
            # It was about to be paused: see what came of that.
            live, _ = await self._core.turn(live.record.id, Operation.NETWORK)

    async def _go_back(self, live: Live, slot: Slot, before: Network) -> None:
        self._commit(live, before)
        try:  # they may have been changed all the same
            await self._core.launcher.slots.apply(slot, before.policy)
        except HostFault as error:  # the caller hears what went wrong first
            log.error("sandbox %s: its network rules are not certain: %s", live.record.id, error)

    def _commit(self, live: Live, network: Network) -> None:
        self._core.commit(live, replace(live.record, network=network))
