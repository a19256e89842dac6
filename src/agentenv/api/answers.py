"""From sandbox records to E2B's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi.responses import JSONResponse

from agentenv.api.models import (
    AttachedDrive,
    BranchAnswer,
    ForkAnswer,
    ForkError,
    Given,
    LifecycleAnswer,
    ListedSandbox,
    OperationAnswer,
    PhaseAnswer,
    SandboxAnswer,
    SandboxDetail,
    SnapshotAnswer,
    SnapshotDetail,
    rfc3339,
)
from agentenv.errors import AenvError
from agentenv.limits import Limits, spelled
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.records import Sandbox
from agentenv.sandbox.requests import Answer
from agentenv.sandbox.transitions import SHOWN
from agentenv.snapshot.lineage import Branch, Lineage
from agentenv.snapshot.records import Attached, Snapshot


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


def operation(phases: Phases) -> OperationAnswer:
    """The same as `timing`, as it is told later."""
    return OperationAnswer(
        operation=phases.operation,
        seconds=phases.total_s,
        phases=[
            PhaseAnswer(
                name=each.name, begunSeconds=each.begun_s, seconds=each.duration_s, failed=each.failed
            )
            for each in phases.ended
        ],
    )


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
        limits=_limits(sandbox.limits) or None,
        lifecycle=LifecycleAnswer(
            onTimeout=sandbox.lifecycle.on_timeout, autoResume=sandbox.lifecycle.auto_resume
        ),
        pauseMode=sandbox.pause_mode,
        envdUnresponsiveAtPause=None if sandbox.agent_answered else True,
        reason=sandbox.reason,
        snapshotID=sandbox.snapshot,
        attachedDrives=[_drive(each) for each in sandbox.drives] or None,
    )


def _drive(drive: Attached) -> AttachedDrive:
    return AttachedDrive(
        id=drive.id,
        image=drive.image,
        readOnly=drive.read_only,
        mountPath=drive.path,
        subPath=drive.part,
        diskSizeMB=drive.disk_mib,
    )


def _limits(limits: Limits) -> dict[str, dict[str, int]]:
    return {
        room: {spelled(name): value for name, value in asdict(part).items() if value is not None}
        for room, part in (("network", limits.network), ("disk", limits.disk))
        if part
    }


def of_many(results: Sequence[Answer | AenvError], domain: str | None) -> list[ForkAnswer]:
    """The answer to a fork or batch: one item per sandbox, in the order that was asked."""
    return [
        ForkAnswer(error=ForkError(code=each.status, message=str(each)))
        if isinstance(each, AenvError)
        else ForkAnswer(sandbox=created(each.sandbox, domain))
        for each in results
    ]


def snapshot(record: Snapshot) -> SnapshotAnswer:
    """An item of a list of snapshots."""
    return SnapshotAnswer(snapshotID=record.id, names=list(record.names))


def lineage(found: Lineage) -> SnapshotDetail:
    """One snapshot with its relatives."""
    parent = None if found.parent is None else found.parent.id
    children = [child.id for child in found.children]
    return SnapshotDetail(**_described(found.snapshot), parent=parent, children=children)


def branch(grown: Branch) -> BranchAnswer:
    """A branch of a tree."""
    children = [child.snapshot.id for child in grown.children]
    return BranchAnswer(
        **_described(grown.snapshot),
        parent=grown.snapshot.parent,
        children=children,
        branches=[branch(child) for child in grown.children],
    )


def _described(record: Snapshot) -> dict[str, Any]:
    return {
        "snapshotID": record.id,
        "names": list(record.names),
        "kind": record.kind,
        "templateID": record.template.id,
        "sandboxID": record.sandbox_id,
        "createdAt": rfc3339(record.created_at),
        "cpuCount": record.resources.vcpus,
        "memoryMB": record.resources.memory_mib,
        "diskSizeMB": record.resources.disk_mib,
        "addedBytes": record.added_bytes,
        "durable": record.durable,
        "mode": "filesystem" if record.memory is None else "full",
    }
