"""Parts of E2B's interface that this version lacks: known, and refused with a clear 501.

An unknown route's 404 would be read by clients as "no such sandbox".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response

from agentenv.errors import NotImplementedYet

PLANNED = (
    ("GET", "/sandboxes/{sandbox_id}/metrics", "metrics of sandboxes"),
    ("GET", "/sandboxes/metrics", "metrics of sandboxes"),
    ("GET", "/sandboxes/{sandbox_id}/logs", "logs of sandboxes"),
    ("GET", "/v2/sandboxes/{sandbox_id}/logs", "logs of sandboxes"),
    ("POST", "/templates", "the first version of building templates, which sends a Dockerfile"),
    ("GET", "/volumes", "volumes"),
    ("POST", "/volumes", "volumes"),
    ("GET", "/secrets", "secrets"),
    ("POST", "/secrets", "secrets"),
)


def routes() -> APIRouter:
    """A route for each that refuses."""
    router = APIRouter(include_in_schema=False)
    for method, path, what in PLANNED:
        router.add_api_route(path, _refusal(what), methods=[method])
    return router


def _refusal(what: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise NotImplementedYet(f"{what}: not part of this version")

    return refuse
