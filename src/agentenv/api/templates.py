"""Routes of templates: looking and deleting. Building comes with a later version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from agentenv.api import answers
from agentenv.api.models import TemplateAlias, TemplateAnswer, rfc3339
from agentenv.sandbox.parts import Template


class ListedTemplate(Template, Protocol):
    """What of a template is shown."""

    @property
    def created_at(self) -> float: ...
    @property
    def updated_at(self) -> float: ...


class Catalogue(Protocol):
    """The templates of this node."""

    def get(self, reference: str) -> ListedTemplate:
        """The template of that id or name; NotFound when there is none."""

    def list(self) -> Sequence[ListedTemplate]:
        """All of them."""

    def delete(self, name_or_id: str) -> ListedTemplate:
        """Remove one; NotFound when there is none, Conflict when sandboxes use it."""


class Deletes(Protocol):
    """What else is deleted as a template: snapshots."""

    def delete_snapshot(self, name_or_id: str) -> bool:
        """Delete a snapshot; False when there is none of that name."""

    def template_deleted(self, template_id: str) -> None:
        """What was made for starting from a template is needed no more."""


def routes(catalogue: Catalogue, snapshots: Deletes) -> APIRouter:
    """The template routes over `catalogue`."""
    router = APIRouter(tags=["templates"])

    @router.get("/templates", response_model=list[TemplateAnswer])
    async def list_v1() -> Response:
        """List templates."""
        return _listed(catalogue)

    @router.get("/v2/templates", response_model=list[TemplateAnswer])
    async def list_v2() -> Response:
        """List templates."""
        return _listed(catalogue)

    @router.get("/templates/aliases/{alias:path}", response_model=TemplateAlias)
    async def by_alias(alias: str) -> Response:
        """Whether a template of that name exists, and its id."""
        return answers.json(TemplateAlias(templateID=catalogue.get(alias).id))

    @router.get("/templates/{template_id}", response_model=TemplateAnswer)
    async def get(template_id: str) -> Response:
        """Look at one template."""
        shown = _fields(catalogue.get(template_id))
        builds = [{"buildID": shown["buildID"], "status": "ready", "createdAt": shown["createdAt"]}]
        return JSONResponse({**shown, "builds": builds})

    @router.delete("/templates/{template_id:path}", status_code=204)
    async def delete(template_id: str) -> Response:
        """Delete a snapshot or a template. What was started from it goes on."""
        if not snapshots.delete_snapshot(template_id):
            snapshots.template_deleted(catalogue.delete(template_id).id)
        return Response(status_code=204)

    return router


def _listed(catalogue: Catalogue) -> JSONResponse:
    return JSONResponse([_fields(each) for each in catalogue.list()])


def _fields(template: ListedTemplate) -> dict[str, Any]:
    return TemplateAnswer(
        templateID=template.id,
        buildID=template.build_id,
        cpuCount=template.vcpus,
        memoryMB=template.memory_mib,
        diskSizeMB=template.disk_mib,
        aliases=[template.name],
        names=[template.name],
        createdAt=rfc3339(template.created_at),
        updatedAt=rfc3339(template.updated_at),
    ).model_dump()
