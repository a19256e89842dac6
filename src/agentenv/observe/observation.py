"""All that watches a node's sandboxes, put together."""

from __future__ import annotations

from agentenv.building.builder import Builder
from agentenv.image.cache import Images
from agentenv.observe.events import Events
from agentenv.observe.logbook import Logbook
from agentenv.observe.metrics import Metrics
from agentenv.observe.samples import Histories
from agentenv.observe.sampling import Ask, Sampler, ask_agent
from agentenv.observe.traces import configured
from agentenv.sandbox.service import Sandboxes


class Observation:
    """Watches the sandboxes of a service from when it is made, before that is started, until `stop`."""

    def __init__(self, service: Sandboxes, *, ask: Ask = ask_agent) -> None:
        self.histories = Histories()
        self.logbook = Logbook()
        self.events = Events()
        self.sampler = Sampler(service.running, self.histories, ask=ask)
        self.metrics = Metrics(service, self.events)
        self.traces = configured()
        for observer in (self.sampler, self.logbook, self.events, self.metrics, self.traces):
            if observer is not None:
                service.observe(observer)

    def watch(self, builder: Builder, images: Images) -> None:
        """Watch the builds of a node and its images as well."""
        self.metrics.builder, self.metrics.images = builder, images
        builder.observe(self.events.built)
        builder.observe(self.metrics.built)

    def start(self) -> None:
        """Begin to take samples."""
        self.sampler.start()

    async def stop(self) -> None:
        """Watch no more."""
        await self.sampler.stop()
        if self.traces is not None:
            await self.traces.stop()
