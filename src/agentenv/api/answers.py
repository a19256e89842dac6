"""From sandbox records to E2B's answers."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from agentenv.api.models import Given, LifecycleAnswer, ListedSandbox, SandboxAnswer, SandboxDetail, rfc3339
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.records import Sandbox
from agentenv.sandbox.transitions import SHOWN


def json(
    body: Given | list[Any], status: int = 200, *, headers: dict[str, str] | None = None
) -> JSONResponse:
    """An answer without the fields that are None: E2B's clients take no null for most."""
    if isinstance(body, list):
        return JSONResponse([_fields(each) for each in body], status, headers)
    return JSONResponse(_fields(body), status, headers)


def _fields(body: Given) -> dict[str, Any]:
    return body.model_dump(exclude_none=True)


def timing(phases: Phases | None) -> dict[str, str]:
    """The header that tells what an operation spent its time on."""
    return {} if phases is None else {"Server-Timing": phases.header()}


def created(sandbox: Sandbox, domain: str | None) -> SandboxAnswer:
    """The answer to create and connect."""
    return SandboxAnswer(
        templateID=sandbox.template.id,
        sandboxID=sandbox.id,
        alias=sandbox.template.name,
        envdAccessToken=sandbox.access_token,
        trafficAccessToken=sandbox.traffic_token,
        domain=domain,
    )


def listed(sandbox: Sandbox) -> ListedSandbox:
    """An item of a list."""
    return ListedSandbox(**_listed(sandbox))


def _listed(sandbox: Sandbox) -> dict[str, Any]:
    return {
        "templateID": sandbox.template.id,
        "sandboxID": sandbox.id,
        "alias": sandbox.template.name,
        "startedAt": rfc3339(sandbox.started_at),
        "endAt": rfc3339(sandbox.end_at),
        "cpuCount": sandbox.vcpus,
        "memoryMB": sandbox.memory_mib,
        "diskSizeMB": sandbox.disk_mib,
        "state": SHOWN[sandbox.state],
        "metadata": sandbox.metadata,
    }


def detail(sandbox: Sandbox, domain: str | None) -> SandboxDetail:
    """The answer to a get."""
    return SandboxDetail(
        **_listed(sandbox),
        envdAccessToken=sandbox.access_token,
        domain=domain,
        allowInternetAccess=sandbox.network.internet,
        network=sandbox.network.given,
        lifecycle=LifecycleAnswer(
            onTimeout=sandbox.lifecycle.on_timeout, autoResume=sandbox.lifecycle.auto_resume
        ),
    )
