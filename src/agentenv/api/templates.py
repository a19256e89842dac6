"""Routes of templates: looking, publishing, tags, deleting."""

from __future__ import annotations

from typing import Protocol

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from agentenv.api import answers
from agentenv.api.build_models import (
    AssignBody,
    NamesAnswer,
    PublicBody,
    RemoveBody,
    TagAnswer,
    TagsAnswer,
)
from agentenv.api.models import TemplateAlias, TemplateAnswer, rfc3339
from agentenv.api.projects import Projects
from agentenv.api.template_answers import build, fields
from agentenv.building.builder import Builder
from agentenv.config import Settings
from agentenv.errors import NotFound
from agentenv.template import names
from agentenv.template.records import Named, Tag, Template


class Catalogue(Protocol):
    """The templates of this node; see template.store.Templates."""

    def all(self) -> tuple[Named, ...]:
        """All of them."""

    def find_named(self, reference: str) -> Named | None:
        """The template of that id or name."""

    def named(self, reference: str) -> Named:
        """The same; NotFound when there is none."""

    def delete(self, reference: str) -> Named:
        """Remove one; NotFound when there is none, Conflict when sandboxes use it."""

    def set_public(self, reference: str, public: bool) -> Named:
        """Say whether it is for everybody."""

    def tags(self, reference: str) -> tuple[Tag, ...]:
        """A template's tags."""

    def assign_tags(self, target: str, tags: tuple[str, ...]) -> Template:
        """Have tags point to what `target` means."""

    def remove_tags(self, name: str, tags: tuple[str, ...]) -> None:
        """Take tags away."""


class Deletes(Protocol):
    """What else is deleted as a template: snapshots."""

    def delete_snapshot(self, name_or_id: str) -> bool:
        """Delete a snapshot; False when there is none of that name."""

    def template_deleted(self, template_id: str) -> None:
        """What was made for starting from a template is needed no more."""

    def drop_outdated(self) -> None:
        """Delete what was made for builds that no tag points to."""


def routes(
    catalogue: Catalogue,
    snapshots: Deletes,
    settings: Settings,
    builder: Builder | None,
    projects: Projects,
) -> APIRouter:
    """The template routes over `catalogue`; `builder` is told of what is deleted."""
    router = APIRouter(tags=["templates"])
    _tags(router, catalogue, snapshots, projects)
    _looking(router, catalogue, settings, projects)
    _changing(router, catalogue, snapshots, builder, projects)
    return router


def _tags(router: APIRouter, catalogue: Catalogue, snapshots: Deletes, projects: Projects) -> None:
    @router.post("/templates/tags", status_code=201, response_model=TagsAnswer)
    async def assign(body: AssignBody) -> Response:
        """Have tags point to a build, named by one of its tags."""
        tags = names.check_tags(body.tags)
        found = catalogue.assign_tags(projects.own(body.target), tags)
        return answers.json(TagsAnswer(tags=list(tags), buildID=found.build_id), 201)

    @router.delete("/templates/tags", status_code=204)
    async def remove(body: RemoveBody) -> Response:
        """Take tags away from a template."""
        catalogue.remove_tags(projects.own(body.name), names.check_tags(body.tags))
        snapshots.drop_outdated()
        return Response(status_code=204)

    @router.get("/templates/{template_id:path}/tags", response_model=list[TagAnswer])
    async def listed(template_id: str) -> Response:
        """List a template's tags."""
        return answers.json(
            [
                TagAnswer(tag=tag.tag, buildID=tag.build_id, createdAt=rfc3339(tag.assigned_at))
                for tag in catalogue.tags(projects.readable(template_id))
            ]
        )


def _looking(router: APIRouter, catalogue: Catalogue, settings: Settings, projects: Projects) -> None:
    @router.get("/templates", response_model=list[TemplateAnswer])
    @router.get("/v2/templates", response_model=list[TemplateAnswer])
    async def listed() -> Response:
        """List templates: the project's own, and those that are published."""
        return JSONResponse([fields(each, settings) for each in catalogue.all() if projects.sees(each)])

    @router.get("/templates/aliases/{alias:path}", response_model=TemplateAlias)
    async def by_alias(alias: str) -> Response:
        """Whether a template of that name exists, and its id."""
        found = catalogue.named(projects.readable(alias))
        tag = names.parse(alias).tag
        if tag is not None and tag not in found.tags:
            raise NotFound(f'template "{found.name}" has no tag "{tag}"')
        return answers.json(TemplateAlias(templateID=found.id, public=found.public))

    @router.get("/templates/{template_id:path}", response_model=TemplateAnswer)
    async def get(template_id: str) -> Response:
        """Look at one template, with its builds."""
        found = catalogue.named(projects.readable(template_id))
        builds = [build(found, each, settings) for each in found.builds]
        return JSONResponse({**fields(found, settings), "builds": builds})


def _changing(
    router: APIRouter,
    catalogue: Catalogue,
    snapshots: Deletes,
    builder: Builder | None,
    projects: Projects,
) -> None:
    @router.patch("/v2/templates/{template_id:path}", response_model=NamesAnswer)
    @router.patch("/templates/{template_id:path}", response_model=NamesAnswer)
    async def publish(template_id: str, body: PublicBody) -> Response:
        """Say whether a template is public."""
        named = catalogue.named(projects.own(template_id))
        if body.public is not None:
            named = catalogue.set_public(named.id, body.public)
        return answers.json(NamesAnswer(names=[named.name]))

    @router.delete("/templates/{template_id:path}", status_code=204)
    async def delete(template_id: str) -> Response:
        """Delete a snapshot, or a template with all its builds. Sandboxes go on; a template that some were
        started from is refused."""
        reference = projects.own(template_id)
        if not snapshots.delete_snapshot(reference):
            gone = catalogue.delete(reference)
            snapshots.template_deleted(gone.id)
            if builder is not None:
                await builder.deleted(gone)
        return Response(status_code=204)
