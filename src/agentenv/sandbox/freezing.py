"""The guest's filesystem at rest, for captures of the disk alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentenv.errors import GuestFault
from agentenv.sandbox.core import Core
from agentenv.sandbox.launch import AgentClient
from agentenv.sandbox.live import Live
from agentenv.sandbox.phases import Phases

log = logging.getLogger(__name__)

THAW_LIMIT_S = 5.0


@asynccontextmanager
async def at_rest(core: Core, live: Live, phases: Phases) -> AsyncIterator[AgentClient]:
    """All that the guest wrote is on its disk, and it writes nothing more, while the block runs; or as
    long as the guest's own limit allows. Given is the client whose connection keeps it so.

    Raises:
        GuestFault: the agent does not answer; nothing is at rest.
    """
    assert live.slot is not None
    agent = core.launcher.agent_at(live.slot.address)
    limit_s = core.settings.resume_timeout_s
    try:
        try:
            async with asyncio.timeout(limit_s):
                with phases("agent"):
                    await agent.freeze()
        except TimeoutError as error:
            raise GuestFault(
                f"the agent of sandbox {live.record.id} did not write its disk out within {limit_s:g} s"
            ) from error
        yield agent
    finally:
        await agent.close()


async def write_again(agent: AgentClient, live: Live, phases: Phases) -> None:
    """Wait until a guest that runs on has its filesystem back: what is done with it next finds it so."""
    try:
        async with asyncio.timeout(THAW_LIMIT_S):
            with phases("thaw"):
                await agent.thaw()
    except (GuestFault, TimeoutError) as error:  # it does so without being asked, a little later
        log.warning("sandbox %s does not say that it writes again: %s", live.record.id, error)
