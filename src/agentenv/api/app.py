"""The control plane as an ASGI application."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware

from agentenv import __version__
from agentenv.api import builds, exports, faults, planned, sandboxes, snapshots, templates
from agentenv.api.domain import advertised
from agentenv.api.gate import BodyBound, KeyGate
from agentenv.api.models import Fault
from agentenv.building.builder import Builder
from agentenv.config import Settings
from agentenv.sandbox.service import Sandboxes

EXPOSED_HEADERS = ["x-next-token", "X-Total-Running", "Server-Timing", "Retry-After", "Should-Retry"]


def create_app(
    service: Sandboxes,
    catalogue: templates.Catalogue,
    settings: Settings,
    *,
    api_key: str,
    port: int,
    builder: Builder | None = None,
) -> FastAPI:
    """The application over the given parts; `port` is the one it is served on."""

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
        """Whether the node serves; needs no key."""
        return Response(status_code=204)

    app.include_router(planned.routes())
    app.include_router(snapshots.routes(service, settings, domain_for))
    app.include_router(sandboxes.routes(service, settings, domain_for))
    if builder is not None:
        app.include_router(builds.routes(builder))
        app.include_router(exports.routes(builder.exporter))
    app.include_router(templates.routes(catalogue, service, settings, builder))
    faults.install(app)
    # The last one added is the outermost.
    app.add_middleware(BodyBound)
    app.add_middleware(KeyGate, api_key=api_key)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )
    return app
