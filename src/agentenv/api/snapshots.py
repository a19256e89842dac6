"""Routes of snapshots: taking, listing, going back to them, starting many, and who descends from whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from agentenv.api import answers, requests
from agentenv.api.models import (
    BatchBody,
    ForkAnswer,
    ForkBody,
    RollbackBody,
    SandboxAnswer,
    SnapshotAnswer,
    SnapshotBody,
    SnapshotDetail,
    TreeAnswer,
)
from agentenv.api.projects import Projects
from agentenv.config import Settings
from agentenv.sandbox.service import Sandboxes

DomainFor = Callable[[Request], str | None]


def routes(service: Sandboxes, settings: Settings, domain_for: DomainFor, projects: Projects) -> APIRouter:
    """All routes of snapshots over `service`."""
    router = APIRouter(tags=["snapshots"])
    _of_sandboxes(router, service, domain_for, projects)
    _looking(router, service, projects)
    _many(router, service, settings, domain_for, projects)
    return router


def _of_sandboxes(router: APIRouter, service: Sandboxes, domain_for: DomainFor, projects: Projects) -> None:
    @router.post("/sandboxes/{sandbox_id}/snapshots", status_code=201, response_model=SnapshotAnswer)
    async def take(sandbox_id: str, body: SnapshotBody | None = None) -> Response:
        """Take a snapshot of a sandbox, which goes on; it is a template from then on."""
        given = body or SnapshotBody()
        name = None if given.name is None else projects.new_name(given.name)
        made, phases = await service.checkpoint(sandbox_id, name, memory=given.memory is not False)
        return answers.json(answers.snapshot(made), 201, headers=answers.timing(phases))

    @router.post("/sandboxes/{sandbox_id}/rollback", response_model=SandboxAnswer)
    async def rollback(request: Request, sandbox_id: str, body: RollbackBody | None = None) -> Response:
        """Put a sandbox back to one of its own snapshots, or to its start."""
        to = projects.own(body.snapshotID) if body and body.snapshotID else None
        answer = await service.rollback(sandbox_id, to)
        headers = answers.timing(answer.phases)
        return answers.json(answers.created(answer.sandbox, domain_for(request)), headers=headers)

    @router.get("/sandboxes/{sandbox_id}/tree", response_model=TreeAnswer)
    async def tree(sandbox_id: str) -> Response:
        """The snapshots taken of a sandbox, each below the one it grew from."""
        sandbox = service.get(sandbox_id)
        branches = [answers.branch(each) for each in service.snapshots.tree(sandbox_id)]
        return answers.json(
            TreeAnswer(
                sandboxID=sandbox_id, startID=sandbox.start, snapshotID=sandbox.snapshot, branches=branches
            )
        )


def _looking(router: APIRouter, service: Sandboxes, projects: Projects) -> None:
    @router.get("/snapshots", response_model=list[SnapshotAnswer])
    async def listed(
        sandboxID: str | None = None,
        name: str | None = None,
        limit: Annotated[int | None, Query()] = None,
        nextToken: str | None = None,
    ) -> Response:
        """List snapshots, newest first. The header `x-next-token` is there when more follow."""
        name = projects.wanted_name(name) if name else None
        query = requests.snapshot_query(sandbox_id=sandboxID, name=name, limit=limit, token=nextToken)
        page = service.snapshots.list(replace(query, project=projects.current))
        headers = {"x-next-token": page.next_token} if page.next_token else None
        return answers.json([answers.snapshot(each) for each in page.snapshots], headers=headers)

    @router.get("/snapshots/{snapshot_id:path}", response_model=SnapshotDetail)
    async def get(snapshot_id: str) -> Response:
        """Look at one snapshot, with its parent and children."""
        return answers.json(answers.lineage(service.snapshots.lineage(projects.own(snapshot_id))))


def _many(
    router: APIRouter, service: Sandboxes, settings: Settings, domain_for: DomainFor, projects: Projects
) -> None:
    @router.post("/sandboxes/{sandbox_id}/fork", status_code=201, response_model=list[ForkAnswer])
    async def fork(request: Request, sandbox_id: str, body: ForkBody | None = None) -> Response:
        """Start `count` sandboxes that go on from where this one is; it goes on as well."""
        given = body or ForkBody()
        timeout_s = requests.create_timeout(given.timeout, settings.timeout_s, settings.timeout_max_s)
        children = requests.children(given.children)
        count = given.count if given.count is not None else max(1, len(children))
        results = await service.fork(sandbox_id, count, timeout_s, children)
        headers = answers.timing(results.phases)
        return answers.json(answers.of_many(results, domain_for(request)), 201, headers=headers)

    @router.post("/sandboxes/batch", status_code=201, response_model=list[ForkAnswer])
    async def batch(request: Request, body: BatchBody) -> Response:
        """Start `count` sandboxes from one template or snapshot."""
        children = requests.children(body.children)
        count = body.count if body.count is not None else max(1, len(children))
        wanted = projects.stamped(requests.new_sandbox(body, settings))
        results = await service.batch(wanted, count, children)
        return answers.json(answers.of_many(results, domain_for(request)), 201)
