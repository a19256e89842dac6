"""The control plane as an ASGI application."""

from __future__ import annotations

import time

from fastapi import Depends, FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware

from agentenv import __version__
from agentenv.api import builds, events, exports, faults, observing, planned, sandboxes, snapshots, templates
from agentenv.api import keys as key_routes
from agentenv.api.accounting import HEADER, Accounting, Routed
from agentenv.api.auditing import Auditing
from agentenv.api.domain import advertised
from agentenv.api.gate import BodyBound, KeyGate
from agentenv.api.models import Fault
from agentenv.api.projects import Projects
from agentenv.building.builder import Builder
from agentenv.config import Settings
from agentenv.identity.audit import Audit
from agentenv.identity.keys import Keys
from agentenv.identity.rates import Rates
from agentenv.observe.observation import Observation
from agentenv.sandbox.service import Sandboxes

EXPOSED_HEADERS = ["x-next-token", "X-Total-Running", "Server-Timing", "Retry-After", "Should-Retry", HEADER]


def create_app(
    service: Sandboxes,
    catalogue: templates.Catalogue,
    settings: Settings,
    *,
    keys: Keys,
    port: int,
    builder: Builder | None = None,
    observation: Observation | None = None,
    audit: Audit | None = None,
) -> FastAPI:
    """The application over the given parts; `port` is the one it is served on."""
    projects = Projects(service, catalogue, keys)
    guarded = [Depends(projects.guard)]

    def domain_for(request: Request) -> str | None:
        return advertised(settings, request.headers.get("host", ""), port)

    app = FastAPI(
        title="AgentENV",
        version=__version__,
        redirect_slashes=False,
        redoc_url=None,
        responses={"default": {"model": Fault}},
    )

    @app.get("/health", status_code=204, tags=["node"])
    async def health() -> Response:
        """Whether the node serves, and by `X-AgentENV-Version` which version; needs no key."""
        return Response(status_code=204, headers={"X-AgentENV-Version": __version__})

    app.include_router(planned.routes())
    if observation is not None:  # its /sandboxes/metrics comes before /sandboxes/{sandbox_id}
        observation.events.project_of = projects.of_build
        app.include_router(observing.routes(service, observation, projects), dependencies=guarded)
        app.include_router(events.routes(observation.events, projects, keys), dependencies=guarded)
    app.include_router(snapshots.routes(service, settings, domain_for, projects), dependencies=guarded)
    app.include_router(sandboxes.routes(service, settings, domain_for, projects), dependencies=guarded)
    if builder is not None:
        app.include_router(builds.routes(builder, projects))
        app.include_router(exports.routes(builder.exporter, projects))
    app.include_router(templates.routes(catalogue, service, settings, builder, projects))
    app.include_router(key_routes.routes(keys))
    faults.install(app)
    # The last one added is the outermost.
    app.add_middleware(Routed)
    if audit is not None:
        app.add_middleware(Auditing, audit=audit)
    app.add_middleware(BodyBound)
    rates = Rates(time.monotonic)
    keys.on_revoked(rates.forget)
    app.add_middleware(KeyGate, keys=keys, rates=rates)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )
    if observation is None:
        app.add_middleware(Accounting)
    else:
        app.add_middleware(Accounting, answered=observation.metrics.answered, traces=observation.traces)
    return app
