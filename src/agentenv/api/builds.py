"""Routes of builds: E2B's version 3, as its clients' template builders use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response

from agentenv.api import answers
from agentenv.api.build_models import (
    BuildAnswer,
    BuildBody,
    LogAnswer,
    LogsAnswer,
    ReasonAnswer,
    RegistryBody,
    StartBody,
    StatusAnswer,
    UploadAnswer,
    definition_steps,
)
from agentenv.api.gate import UPLOADS
from agentenv.api.models import rfc3339
from agentenv.api.projects import Projects
from agentenv.building.builder import Builder, Status
from agentenv.building.definition import Definition, Step, define
from agentenv.building.ground import IMAGE
from agentenv.building.logs import PAGE_MAX, Entry
from agentenv.errors import InvalidRequest, NotImplementedYet
from agentenv.image.credentials import AwsKeys, Credentials
from agentenv.snapshot.records import Start
from agentenv.template.records import Build, Named
from agentenv.template.states import SHOWN

Level = Literal["debug", "info", "warn", "error"]


@dataclass(frozen=True)
class Page:
    """Which of a log's entries are wanted: from which on, how many, and of which level at least."""

    logsOffset: Annotated[int, Query(ge=0)] = 0
    limit: Annotated[int, Query(ge=0, le=PAGE_MAX)] = PAGE_MAX
    level: Level = "debug"

    def of(self, builder: Builder, template_id: str, build_id: str) -> Status:
        """A build with those entries."""
        return builder.status(
            template_id, build_id, offset=self.logsOffset, limit=self.limit, level=self.level
        )


def routes(builder: Builder, projects: Projects) -> APIRouter:
    """All routes of builds over `builder`."""
    router = APIRouter(tags=["builds"])
    _making(router, builder, projects)
    _files(router, builder, projects)
    _looking(router, builder, projects)
    return router


def _making(router: APIRouter, builder: Builder, projects: Projects) -> None:
    @router.post("/v3/templates", status_code=202, response_model=BuildAnswer)
    @router.post("/v2/templates", status_code=202, response_model=BuildAnswer)
    async def request(body: BuildBody) -> Response:
        """Ask for a build of a template, which is made if there is none of that name."""
        name = body.name or body.alias
        if name is None:
            raise InvalidRequest("name is missing")
        named, build = builder.open(
            projects.new_name(name),
            body.tags or (),
            vcpus=body.cpuCount,
            memory_mib=body.memoryMB,
            free_mib=body.minFreeDiskMb,
        )
        return answers.json(_opened(named, build), 202)

    @router.post("/v2/templates/{template_id:path}/builds/{build_id}", status_code=202)
    async def begin(template_id: str, build_id: str, body: StartBody) -> Response:
        """Say what a build is made of, and begin it."""
        build = builder.find(projects.own(template_id), build_id)
        try:
            builder.begin(build, _definition(body, projects))
        except (InvalidRequest, NotImplementedYet) as error:
            builder.refuse(build, error)
            raise
        return Response(status_code=202)

    @router.delete("/templates/{template_id:path}/builds/{build_id}", status_code=204)
    async def cancel(template_id: str, build_id: str) -> Response:
        """Cancel a build; one that has ended stays as it is."""
        await builder.cancel(builder.find(projects.own(template_id), build_id))
        return Response(status_code=204)


def _files(router: APIRouter, builder: Builder, projects: Projects) -> None:
    @router.get("/templates/{template_id:path}/files/{digest}", status_code=201, response_model=UploadAnswer)
    async def link(request: Request, template_id: str, digest: str) -> Response:
        """Whether the files of a hash are here, and where to upload them."""
        projects.own(template_id)
        present = builder.contexts.find(digest) is not None
        url = f"{request.base_url}{UPLOADS[1:]}{digest}?ticket={builder.contexts.ticket(digest)}"
        return answers.json(UploadAnswer(present=present, url=url), 201)

    @router.put(UPLOADS + "{digest}", status_code=200)
    async def upload(request: Request, digest: str, ticket: str = "") -> Response:
        """Upload a tar archive; needs no key but the link's ticket."""
        builder.contexts.check(digest, ticket)
        await builder.contexts.receive(digest, request.stream())
        return Response(status_code=200)


def _looking(router: APIRouter, builder: Builder, projects: Projects) -> None:
    @router.get("/templates/{template_id:path}/builds/{build_id}/status", response_model=StatusAnswer)
    async def status(
        template_id: str,
        build_id: str,
        page: Annotated[Page, Depends()],
    ) -> Response:
        """How a build is getting on, and what it told from entry `logsOffset` on."""
        return answers.json(_status(page.of(builder, projects.own(template_id), build_id)))

    @router.get("/templates/{template_id:path}/builds/{build_id}/logs", response_model=LogsAnswer)
    async def logs(
        template_id: str,
        build_id: str,
        page: Annotated[Page, Depends()],
    ) -> Response:
        """What a build told."""
        found = page.of(builder, projects.own(template_id), build_id)
        return answers.json(LogsAnswer(logs=_entries(found.entries)))


def _opened(named: Named, build: Build) -> BuildAnswer:
    return BuildAnswer(
        templateID=named.id,
        buildID=build.id,
        public=named.public,
        names=[named.name],
        aliases=[named.name],
        tags=list(build.tags),
    )


def _status(found: Status) -> StatusAnswer:
    build = found.build
    reason = build.reason
    return StatusAnswer.model_validate(
        {
            "templateID": build.template_id,
            "buildID": build.id,
            "status": SHOWN[build.state],
            "logEntries": _entries(found.entries),
            "reason": reason and ReasonAnswer(message=reason.message, step=reason.step),
        }
    )


def _entries(entries: Sequence[Entry]) -> list[LogAnswer]:
    return [
        LogAnswer(timestamp=rfc3339(entry.at), message=entry.message, level=entry.level, step=entry.step)
        for entry in entries
    ]


def _definition(body: StartBody, projects: Projects) -> Definition:
    """What is asked for, of templates that this project may use."""
    wanted = _defined(body)
    template = None if wanted.template is None else projects.readable(wanted.template)
    steps = tuple(
        replace(step, source=projects.readable(step.source))
        if step.source and not step.source.startswith(IMAGE)
        else step
        for step in wanted.steps
    )
    return replace(wanted, template=template, steps=steps)


def _defined(body: StartBody) -> Definition:
    return define(
        image=body.fromImage or None,
        template=body.fromTemplate or None,
        steps=[Step(**fields) for fields in definition_steps(body)],
        start=Start((body.startCmd or "").strip(), (body.readyCmd or "").strip()),
        force=bool(body.force),
        init=body.init,
        credentials=_credentials(body.fromImageRegistry),
    )


def _credentials(given: RegistryBody | None) -> Credentials | AwsKeys | None:
    """Those of a pull.

    Raises:
        InvalidRequest: something is missing.
    """
    if given is None:
        return None
    if given.type == "aws":
        keys = given.awsAccessKeyId, given.awsSecretAccessKey, given.awsRegion
        if not all(keys):
            raise InvalidRequest(
                "fromImageRegistry: awsAccessKeyId, awsSecretAccessKey and awsRegion are all needed"
            )
        return AwsKeys(*(key or "" for key in keys))
    if given.type == "gcp":
        if not given.serviceAccountJson:
            raise InvalidRequest("fromImageRegistry: serviceAccountJson is missing")
        return Credentials("_json_key", given.serviceAccountJson)
    if not given.username or given.password is None:
        raise InvalidRequest("fromImageRegistry: username and password are both needed")
    return Credentials(given.username, given.password)
