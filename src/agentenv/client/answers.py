"""What a node tells, as values; sizes in MiB and times in seconds unless a name says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentenv.limits import DiskLimits, Limits, NetworkLimits, spelled


@dataclass(frozen=True)
class Made:
    """A sandbox that was started, and what it is reached with."""

    sandbox_id: str
    template_id: str
    envd_version: str
    domain: str | None = None
    access_token: str | None = None
    traffic_token: str | None = None


@dataclass(frozen=True)
class Refused:
    """Why one of many was not started; `code` is an HTTP status."""

    code: int
    message: str


@dataclass(frozen=True)
class Snapshot:
    """A snapshot: a template to start from, or a point to go back to.

    `parent` and `children` are ids; `mode` is `full` or, without memory, `filesystem`; `added_bytes` is
    what it takes beyond the one that it grew from.
    """

    snapshot_id: str
    names: tuple[str, ...]
    kind: str
    template_id: str
    created_at: str
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    added_bytes: int
    durable: bool
    mode: str
    sandbox_id: str | None = None
    parent: str | None = None
    children: tuple[str, ...] = ()


@dataclass(frozen=True)
class Branch:
    """A snapshot, and what grew from it."""

    snapshot: Snapshot
    branches: tuple[Branch, ...] = ()


@dataclass(frozen=True)
class Tree:
    """The snapshots taken of a sandbox. `start_id` is what it was started from, `snapshot_id` what it
    goes on from now."""

    sandbox_id: str
    start_id: str | None
    snapshot_id: str | None
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Phase:
    """A part of an operation; `begun_s` since the operation began."""

    name: str
    begun_s: float
    seconds: float
    failed: bool = False


@dataclass(frozen=True)
class Operation:
    """What was done with a sandbox, and what the node spent its time on."""

    name: str
    seconds: float
    phases: tuple[Phase, ...]


def made(body: Mapping[str, Any]) -> Made:
    """A sandbox of an answer to create, connect or rollback."""
    return Made(
        sandbox_id=body["sandboxID"],
        template_id=body["templateID"],
        envd_version=body["envdVersion"],
        domain=body.get("domain"),
        access_token=body.get("envdAccessToken"),
        traffic_token=body.get("trafficAccessToken"),
    )


def many(body: list[Mapping[str, Any]]) -> list[Made | Refused]:
    """Those of an answer to fork or batch, in the order that was asked."""
    return [
        made(each["sandbox"])
        if "sandbox" in each
        else Refused(each["error"]["code"], each["error"]["message"])
        for each in body
    ]


def snapshot(body: Mapping[str, Any]) -> Snapshot:
    """A snapshot with its relatives."""
    return Snapshot(
        snapshot_id=body["snapshotID"],
        names=tuple(body["names"]),
        kind=body["kind"],
        template_id=body["templateID"],
        created_at=body["createdAt"],
        cpu_count=body["cpuCount"],
        memory_mb=body["memoryMB"],
        disk_size_mb=body["diskSizeMB"],
        added_bytes=body["addedBytes"],
        durable=body["durable"],
        mode=body["mode"],
        sandbox_id=body.get("sandboxID"),
        parent=body.get("parent"),
        children=tuple(body["children"]),
    )


def _branch(body: Mapping[str, Any]) -> Branch:
    return Branch(snapshot(body), tuple(_branch(each) for each in body["branches"]))


def tree(body: Mapping[str, Any]) -> Tree:
    """The tree of a sandbox."""
    return Tree(
        sandbox_id=body["sandboxID"],
        start_id=body.get("startID"),
        snapshot_id=body.get("snapshotID"),
        branches=tuple(_branch(each) for each in body["branches"]),
    )


def operations(body: list[Mapping[str, Any]]) -> list[Operation]:
    """What was done with a sandbox, oldest first."""
    return [
        Operation(
            each["operation"],
            each["seconds"],
            tuple(
                Phase(phase["name"], phase["begunSeconds"], phase["seconds"], phase["failed"])
                for phase in each["phases"]
            ),
        )
        for each in body
    ]


def limits(body: Mapping[str, Any]) -> Limits:
    """The limits that a look at a sandbox shows."""
    shown = body.get("limits", {})
    network, disk = shown.get("network", {}), shown.get("disk", {})
    return Limits(
        NetworkLimits(**{name: network.get(spelled(name)) for name in NetworkLimits.__dataclass_fields__}),
        DiskLimits(**{name: disk.get(spelled(name)) for name in DiskLimits.__dataclass_fields__}),
    )
