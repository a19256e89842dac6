"""Puts the parts of a node's builder together."""

from __future__ import annotations

from agentenv.building.builder import Builder
from agentenv.building.cache import StepCache
from agentenv.building.contexts import Contexts
from agentenv.building.export import Exporter
from agentenv.building.ground import Grounds
from agentenv.building.logs import Logs
from agentenv.building.maker import After, Maker
from agentenv.building.steps import Steps
from agentenv.building.workshop import GuestAt, Workshop
from agentenv.config import Settings
from agentenv.records.database import Database
from agentenv.sandbox.guest import Guest
from agentenv.sandbox.parts import Images, SystemClock
from agentenv.sandbox.service import Sandboxes
from agentenv.template.builds import Builds
from agentenv.template.store import Templates


def builder(
    settings: Settings,
    database: Database,
    service: Sandboxes,
    templates: Templates,
    images: Images,
    *,
    guest_at: GuestAt = Guest,
) -> Builder:
    """The builder over a node's sandboxes, templates and images."""
    snapshots = service.snapshots
    contexts = Contexts(settings)
    workshop = Workshop(service.launcher, snapshots, service.admission, SystemClock().now, guest_at)
    cache = StepCache(
        database,
        snapshots,
        service.collect_soon,
        budget_mib=settings.step_cache_mib,
        keep_s=settings.step_keep_s,
    )
    steps = Steps(lambda: contexts.directory)
    upkeep = After(service.flatten, service.tend)
    maker = Maker(workshop, cache, snapshots, service.prepared, steps, contexts, upkeep)
    grounds = Grounds(settings, templates, service.prepared, snapshots, images)
    exporter = Exporter(
        templates,
        service.prepared,
        snapshots,
        workshop,
        service.admission,
        lambda: contexts.directory,
        floor_mib=settings.disk_floor_mib,
    )
    builds, logs = Builds(database, templates), Logs(database)
    return Builder(settings, templates, builds, logs, contexts, grounds, maker, exporter)
