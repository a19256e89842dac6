"""Routes of sandboxes, v1 and v2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Body, Header, Query, Request, Response
from fastapi.responses import JSONResponse

from agentenv.api import answers, requests
from agentenv.api.models import (
    ColdBody,
    ConnectBody,
    CreateBody,
    CreateBodyV1,
    LimitsBody,
    ListedSandbox,
    NetworkUpdate,
    OperationAnswer,
    PauseBody,
    RefreshBody,
    ResumeBody,
    SandboxAnswer,
    SandboxDetail,
    TimeoutBody,
)
from agentenv.api.projects import Projects
from agentenv.config import Settings
from agentenv.sandbox import listing
from agentenv.sandbox.service import Sandboxes

IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key")]
Metadata = Annotated[str | None, Query()]
DomainFor = Callable[[Request], str | None]


def routes(service: Sandboxes, settings: Settings, domain_for: DomainFor, projects: Projects) -> APIRouter:
    """All sandbox routes over `service`."""
    router = APIRouter(tags=["sandboxes"])
    _creating(router, service, settings, domain_for, projects)
    _looking(router, service, domain_for, projects)
    _living(router, service, settings, domain_for)
    return router


def _creating(
    router: APIRouter, service: Sandboxes, settings: Settings, domain_for: DomainFor, projects: Projects
) -> None:
    async def create(request: Request, body: CreateBody, key: str | None) -> JSONResponse:
        wanted = projects.stamped(requests.new_sandbox(body, settings))
        answer = await service.create(wanted, requests.idempotency_key(key, body, projects.current))
        headers = {**answers.timing(answer.phases), "x-agentenv-sandbox-id": answer.sandbox.id}
        return answers.json(answers.created(answer.sandbox, domain_for(request)), 201, headers=headers)

    @router.post("/v2/sandboxes", status_code=201, response_model=SandboxAnswer)
    async def create_v2(request: Request, body: CreateBody, key: IdempotencyKey = None) -> Response:
        """Create a sandbox. Its agent always wants the access token of the answer."""
        return await create(request, body, key)

    @router.post("/sandboxes", status_code=201, response_model=SandboxAnswer)
    async def create_v1(request: Request, body: CreateBodyV1, key: IdempotencyKey = None) -> Response:
        """Create a sandbox (the older call)."""
        return await create(request, body, key)

    @router.post("/sandboxes-cold", status_code=201, response_model=SandboxAnswer)
    async def create_cold(request: Request, body: ColdBody, key: IdempotencyKey = None) -> Response:
        """Create a sandbox of an image, pulled and booted unless one of it and of this size was before."""
        return await create(request, body, key)


def _looking(router: APIRouter, service: Sandboxes, domain_for: DomainFor, projects: Projects) -> None:
    @router.get("/v2/sandboxes", response_model=list[ListedSandbox])
    async def list_v2(
        metadata: Metadata = None,
        state: Annotated[list[str] | None, Query()] = None,
        order: str | None = None,
        startedAfter: str | None = None,
        template: str | None = None,
        limit: int | None = None,
        nextToken: str | None = None,
    ) -> Response:
        """List sandboxes, newest first. The header `x-next-token` is there when more follow."""
        query = requests.list_query(
            metadata=metadata,
            states=state,
            order=order,
            started_after=startedAfter,
            template=projects.readable(template) if template else None,
            limit=limit,
            token=nextToken,
        )
        page = service.list(replace(query, project=projects.current))
        headers = {"X-Total-Running": str(page.total_running)}
        if page.next_token:
            headers["x-next-token"] = page.next_token
        return answers.json([answers.listed(each) for each in page.sandboxes], headers=headers)

    @router.get("/sandboxes", response_model=list[ListedSandbox])
    async def list_v1(metadata: Metadata = None) -> Response:
        """List all running sandboxes (the older call)."""
        query = listing.Query(
            states=frozenset({"running"}),
            metadata=requests.metadata_filter(metadata),
            limit=None,
            project=projects.current,
        )
        return answers.json([answers.listed(each) for each in service.list(query).sandboxes])

    @router.get("/sandboxes/{sandbox_id}", response_model=SandboxDetail)
    async def get(request: Request, sandbox_id: str) -> Response:
        """Look at one sandbox."""
        return answers.json(answers.detail(service.get(sandbox_id), domain_for(request)))

    @router.get("/sandboxes/{sandbox_id}/operations", response_model=list[OperationAnswer])
    async def operations(sandbox_id: str) -> Response:
        """What the last operations on a sandbox spent their time on, oldest first, since the node started."""
        return answers.json([answers.operation(each) for each in service.operations(sandbox_id)])


def _living(router: APIRouter, service: Sandboxes, settings: Settings, domain_for: DomainFor) -> None:
    async def connect(request: Request, sandbox_id: str, body: ConnectBody | None) -> JSONResponse:
        given = body or ConnectBody()
        timeout_s = requests.connect_timeout(given.timeout, settings.timeout_s, settings.timeout_max_s)
        answer = await service.connect(sandbox_id, timeout_s, memory=given.memory is not False)
        return answers.json(
            answers.created(answer.sandbox, domain_for(request)),
            201 if answer.resumed else 200,
            headers=answers.timing(answer.phases),
        )

    @router.post("/v2/sandboxes/{sandbox_id}/connect", response_model=SandboxAnswer)
    async def connect_v2(request: Request, sandbox_id: str, body: ConnectBody | None = None) -> Response:
        """Have a sandbox running for at least `timeout` more seconds: 200 when it was, 201 when resumed."""
        return await connect(request, sandbox_id, body)

    @router.post("/sandboxes/{sandbox_id}/connect", response_model=SandboxAnswer)
    async def connect_v1(request: Request, sandbox_id: str, body: ConnectBody | None = None) -> Response:
        """The same (the older call)."""
        return await connect(request, sandbox_id, body)

    @router.post("/sandboxes/{sandbox_id}/resume", status_code=201, response_model=SandboxAnswer)
    async def resume(request: Request, sandbox_id: str, body: ResumeBody | None = None) -> Response:
        """Resume a paused sandbox (the oldest call); 409 when it runs."""
        asked = body.timeout if body else None
        timeout_s = requests.connect_timeout(asked, settings.timeout_v1_s, settings.timeout_max_s)
        answer = await service.resume(sandbox_id, timeout_s)
        headers = answers.timing(answer.phases)
        return answers.json(answers.created(answer.sandbox, domain_for(request)), 201, headers=headers)

    @router.delete("/sandboxes/{sandbox_id}", status_code=204)
    async def kill(sandbox_id: str) -> Response:
        """Kill a sandbox."""
        phases = await service.kill(sandbox_id)
        return Response(status_code=204, headers=answers.timing(phases))

    @router.put("/sandboxes/{sandbox_id}/limits", status_code=204)
    async def set_limits(sandbox_id: str, body: LimitsBody) -> Response:
        """Have these limits in the place of all of before; what is missing is the node's default."""
        await service.set_limits(sandbox_id, requests.limits(body, settings))
        return Response(status_code=204)

    @router.post("/sandboxes/{sandbox_id}/timeout", status_code=204)
    async def set_timeout(sandbox_id: str, body: TimeoutBody) -> Response:
        """Let a sandbox live `timeout` seconds from now; 0 or less ends it now."""
        timeout_s = requests.bounded_timeout(max(0, body.timeout), settings.timeout_max_s)
        await service.set_timeout(sandbox_id, timeout_s)
        return Response(status_code=204)

    @router.put("/sandboxes/{sandbox_id}/network", status_code=204)
    async def set_network(sandbox_id: str, body: NetworkUpdate) -> Response:
        """Replace what a sandbox may reach; in force when answered, of a paused one from its next start."""
        await service.set_network(sandbox_id, requests.egress(body))
        return Response(status_code=204)

    @router.post("/sandboxes/{sandbox_id}/refreshes", status_code=204)
    async def refresh(sandbox_id: str, body: Annotated[RefreshBody | None, Body()] = None) -> Response:
        """Let a sandbox live at least `duration` seconds (default 15, at most 3600) from now."""
        duration = body.duration if body and body.duration is not None else settings.timeout_v1_s
        await service.refresh(sandbox_id, duration)
        return Response(status_code=204)

    @router.post("/sandboxes/{sandbox_id}/refresh-memory", status_code=204)
    async def refresh_memory(sandbox_id: str) -> Response:
        """Have a sandbox start anew in place and give back the memory that it changed; it goes on."""
        phases = await service.refresh_memory(sandbox_id)
        return Response(status_code=204, headers=answers.timing(phases))

    @router.post("/sandboxes/{sandbox_id}/pause", status_code=204)
    async def pause(sandbox_id: str, body: PauseBody | None = None) -> Response:
        """Pause a sandbox; 409 when it is paused already."""
        given = body or PauseBody()
        phases = await service.pause(
            sandbox_id, memory=given.memory is not False, healthy=bool(given.requireHealthyGuest)
        )
        return Response(status_code=204, headers=answers.timing(phases))
