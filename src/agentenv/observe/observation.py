"""All that watches a node's sandboxes, put together."""

from __future__ import annotations

from agentenv.observe.events import Events
from agentenv.observe.logbook import Logbook
from agentenv.observe.samples import Histories
from agentenv.observe.sampling import Ask, Sampler, ask_agent
from agentenv.sandbox.service import Sandboxes


class Observation:
    """Watches the sandboxes of a service from when it is made, before that is started, until `stop`."""

    def __init__(self, service: Sandboxes, *, ask: Ask = ask_agent) -> None:
        self.histories = Histories()
        self.logbook = Logbook()
        self.events = Events()
        self.sampler = Sampler(service.running, self.histories, ask=ask)
        for observer in (self.sampler, self.logbook, self.events):
            service.observe(observer)

    def start(self) -> None:
        """Begin to take samples."""
        self.sampler.start()

    async def stop(self) -> None:
        """Watch no more."""
        await self.sampler.stop()
