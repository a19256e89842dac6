"""The route that exports a template as an image."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from agentenv.api.projects import Projects
from agentenv.building.export import Exported, Exporter, file_name

MEDIA_TYPE = "application/x-tar"


def routes(exporter: Exporter, projects: Projects) -> APIRouter:
    """The route, over `exporter`."""
    router = APIRouter(tags=["templates"])

    @router.get("/templates/{template_id:path}/export", response_class=StreamingResponse)
    async def export(request: Request, template_id: str) -> Response:
        """Export a template's root filesystem as an OCI archive. The answer begins when all of it was read in
        a machine of the template, which may take minutes; it ends with its client."""
        exported = await _while_wanted(request, exporter, projects.readable(template_id))
        if exported is None:
            return Response(status_code=499)  # which nobody sees
        headers = {
            "Content-Length": str(exported.size),
            "Content-Disposition": f'attachment; filename="{file_name(template_id)}.tar"',
        }
        return _Archive(exported, headers)

    return router


class _Archive(StreamingResponse):
    """The answer; what it was made of goes with it, even where nothing of it was sent."""

    def __init__(self, exported: Exported, headers: dict[str, str]) -> None:
        super().__init__(exported.body(), headers=headers, media_type=MEDIA_TYPE)
        self._exported = exported

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exported.close()


async def _while_wanted(request: Request, exporter: Exporter, reference: str) -> Exported | None:
    """The archive, or None if its client has gone before it was there."""
    making = asyncio.create_task(exporter.export(reference), name=f"export {reference}")
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({making, gone}, return_when=asyncio.FIRST_COMPLETED)
        return making.result() if making.done() else None
    finally:
        gone.cancel()
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
