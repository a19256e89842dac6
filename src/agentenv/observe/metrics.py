"""The node's metrics for Prometheus: counts and times as they come, and what it is like when it is asked.

Everything on the way of a request is an addition. What is read, is read in one go on the event loop (some
milliseconds) or on a thread, and written out on a thread.
"""

from __future__ import annotations

import asyncio

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from agentenv.building.builder import Builder
from agentenv.errors import AenvError
from agentenv.image.cache import Images
from agentenv.observe import gauges
from agentenv.observe.events import Events
from agentenv.observe.gauges import Families, Family
from agentenv.proxy.plane import DataPlane
from agentenv.sandbox.observing import Happening, Observer
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.service import Sandboxes
from agentenv.template.records import Build
from agentenv.template.states import ENDS

# Of the text format 0.0.4, which every version of Prometheus reads.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A series more for each one, with the time it began at, which the text format has no name for.
disable_created_metrics()  # type: ignore[no-untyped-call]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics(Observer):
    """All metrics of a node. `plane`, `builder` and `images` are there once the node has them."""

    plane: DataPlane | None = None
    builder: Builder | None = None
    images: Images | None = None

    def __init__(self, service: Sandboxes, events: Events) -> None:
        self._service = service
        self._events = events
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._operations = Counter(
            "aenv_operations", "Operations on sandboxes.", ("operation", "outcome"), registry=registry
        )
        self._seconds = Histogram(
            "aenv_operation_seconds",
            "How long operations took that succeeded.",
            ("operation",),
            buckets=SECONDS,
            registry=registry,
        )
        self._phases = Histogram(
            "aenv_phase_seconds",
            "How long each of their phases took.",
            ("operation", "phase"),
            buckets=SECONDS,
            registry=registry,
        )
        self._changes = Counter(
            "aenv_sandbox_changes", "What happened to sandboxes.", ("change",), registry=registry
        )
        self._builds = Counter("aenv_builds", "Builds that ended.", ("state",), registry=registry)
        self._requests = Counter(
            "aenv_api_requests",
            "Answers of the control plane.",
            ("method", "route", "status"),
            registry=registry,
        )
        self._answering = Histogram(
            "aenv_api_request_seconds",
            "How long the control plane took to answer.",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )

    def happened(self, happening: Happening) -> None:
        self._changes.labels(happening.change).inc()

    def finished(self, phases: Phases) -> None:
        self._seconds.labels(phases.operation).observe(phases.total_s)
        for phase in phases.ended:
            self._phases.labels(phases.operation, phase.name).observe(phase.duration_s)

    def ended(self, operation: str, error: BaseException | None) -> None:
        self._operations.labels(operation, outcome_of(error)).inc()

    def built(self, build: Build) -> None:
        """A build has come to another state."""
        if build.state in ENDS:
            self._builds.labels(build.state).inc()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """The control plane has answered a request."""
        self._requests.labels(method, route, str(status)).inc()
        self._answering.labels(route).observe(seconds)

    async def of_node(self) -> bytes:
        """All but those of single sandboxes, in the text format."""
        families = Families(self._now())

        def write() -> bytes:
            return generate_latest(self._registry) + generate_latest(families)

        return await asyncio.to_thread(write)

    async def of_sandboxes(self) -> bytes:
        """Those of each sandbox that runs."""
        running = list(self._service.running())

        def write() -> bytes:
            return generate_latest(Families(gauges.of_sandboxes(running)))

        return await asyncio.to_thread(write)

    def _now(self) -> list[Family]:
        found = gauges.of_service(self._service)
        if self.plane is not None:
            found += gauges.of_plane(self.plane)
        if self.builder is not None:
            found.append(gauges.one("aenv_builds_under_way", "Builds being made.", self.builder.under_way))
        if self.images is not None:
            found += _of_images(self.images)
        found.append(
            gauges.one("aenv_event_followers", "Clients that follow events.", self._events.following)
        )
        found.append(gauges.program())
        return found


def _of_images(images: Images) -> list[Family]:
    return [
        gauges.by(
            "aenv_images",
            "Images that were wanted, by whether they were here.",
            "result",
            {"present": images.present, "converted": images.converted},
            counts=True,
        ),
        gauges.one("aenv_images_converting", "Images being pulled and converted.", images.converting),
    ]


def outcome_of(error: BaseException | None) -> str:
    """How an operation came out: `ok`, the code of an error, or `cancelled` by the node's end."""
    if error is None:
        return "ok"
    if isinstance(error, AenvError):
        return error.code
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "internal"
