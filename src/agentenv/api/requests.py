"""From what came over HTTP to what the sandbox service is asked; all refusals of values are here."""

from __future__ import annotations

import hashlib
import re
from dataclasses import fields
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import unquote

from agentenv.api.models import (
    Asked,
    AttachedDriveBody,
    ChildBody,
    ColdBody,
    CreateBody,
    CreateBodyV1,
    LimitsBody,
    NetworkConfig,
    NetworkUpdate,
)
from agentenv.config import Settings
from agentenv.errors import InvalidRequest, NotImplementedYet
from agentenv.limits import DiskLimits, Limits, NetworkLimits, chosen, spelled
from agentenv.network.policy import parse
from agentenv.sandbox import masking
from agentenv.sandbox.drives import NewDrive, new_drive
from agentenv.sandbox.forking import Child
from agentenv.sandbox.listing import LIMIT_MAX, Query
from agentenv.sandbox.records import Lifecycle, Network
from agentenv.sandbox.requests import Key, NewSandbox, Shape
from agentenv.snapshot.listing import Query as SnapshotQuery

T = TypeVar("T", NetworkLimits, DiskLimits)

_KEY = re.compile(r"[a-z0-9-]{1,255}")
_STATES = frozenset({"running", "paused"})
_UNSUPPORTED = ("mcp", "iam", "volumeMounts")


def new_sandbox(body: CreateBody, settings: Settings) -> NewSandbox:
    """The sandbox that a create call wants.

    Raises:
        InvalidRequest: a value cannot be right. NotImplementedYet: it asks for what there is not.
    """
    for name in _UNSUPPORTED:
        if getattr(body, name):
            raise NotImplementedYet(f"{name} is not part of this version")
    internet = body.allow_internet_access
    if isinstance(body, ColdBody):
        internet = body.allowInternetAccess if internet is None else internet
        if body.extraBootArgs:
            raise NotImplementedYet("extraBootArgs: the kernel's command line is the same for all guests")
    v1 = isinstance(body, CreateBodyV1)
    default_s = settings.timeout_v1_s if v1 else settings.timeout_s
    return NewSandbox(
        template=body.templateID,
        timeout_s=create_timeout(body.timeout, default_s, settings.timeout_max_s),
        metadata=body.metadata or {},
        env=_variables(body.envVars or {}),
        secure=bool(body.secure) if isinstance(body, CreateBodyV1) else True,
        lifecycle=_lifecycle(body, settings),
        network=_network(body.network, internet),
        limits=limits(body.limits, settings),
        image=body.image if isinstance(body, ColdBody) else None,
        shape=Shape(body.cpuCount, body.memoryMB, body.diskSizeMB),
        drives=tuple(_drive(each) for each in body.attachedDrives or []),
    )


def _drive(given: AttachedDriveBody) -> NewDrive:
    return new_drive(
        given.id,
        given.image,
        path=given.mountPath,
        read_only=given.readOnly is not False,
        part=given.subPath,
        disk_mib=given.diskSizeMB,
    )


def limits(given: LimitsBody | None, settings: Settings) -> Limits:
    """The limits that are asked for, within those of the node.

    Raises:
        InvalidRequest: they cannot be.
    """
    asked = given or LimitsBody()
    return chosen(
        Limits(_spelled(NetworkLimits, asked.network), _spelled(DiskLimits, asked.disk)),
        settings.limits,
        settings.limits_most,
    )


def _spelled(kind: type[T], given: Asked | None) -> T:
    names = (each.name for each in fields(kind))
    return kind() if given is None else kind(**{name: getattr(given, spelled(name)) for name in names})


def create_timeout(asked: int | None, default_s: int, max_s: int) -> int:
    """The time-to-live of a new sandbox, in seconds."""
    if asked is not None and asked <= 0:
        raise InvalidRequest(f"timeout: must be greater than 0, is {asked}")
    return bounded_timeout(asked if asked is not None else min(default_s, max_s), max_s)


def connect_timeout(asked: int | None, default_s: int, max_s: int) -> int:
    """The least time that a connected sandbox is to live from now, in seconds."""
    if asked is not None and asked < 0:
        raise InvalidRequest(f"timeout: must not be negative, is {asked}")
    return bounded_timeout(asked if asked is not None else min(default_s, max_s), max_s)


def bounded_timeout(asked: int, max_s: int) -> int:
    """A time-to-live as it was asked, refused when it is above the node's limit."""
    if asked > max_s:
        raise InvalidRequest(f"timeout: {asked} s is more than this node's limit of {max_s} s")
    return asked


def _variables(given: dict[str, str]) -> dict[str, str]:
    for name, value in given.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise InvalidRequest(f"envVars: {name!r} cannot be an environment variable")
    return given


def _lifecycle(body: CreateBody, settings: Settings) -> Lifecycle:
    memory = body.autoPauseMemory is not False
    resume = body.autoResume is not None and body.autoResume.enabled
    if resume and not memory:
        raise InvalidRequest("autoResume cannot be combined with autoPauseMemory: false")
    paused_s = settings.paused_timeout_s if body.pausedTimeout is None else body.pausedTimeout
    if body.autoPause is None:
        return Lifecycle(settings.on_timeout, resume, memory, paused_s or None)
    return Lifecycle("pause" if body.autoPause else "kill", resume, memory, paused_s or None)


def children(given: list[ChildBody] | None) -> list[Child]:
    """What each of many is to have of its own."""
    return [Child(each.metadata or {}, _variables(each.envVars or {})) for each in given or []]


def snapshot_query(
    *, sandbox_id: str | None, name: str | None, limit: int | None, token: str | None
) -> SnapshotQuery:
    """What a list of snapshots asks for.

    Raises:
        InvalidRequest: a value is not allowed.
    """
    if limit is not None and not 1 <= limit <= LIMIT_MAX:
        raise InvalidRequest(f"limit: must be 1 to {LIMIT_MAX}, is {limit}")
    return SnapshotQuery(sandbox_id or None, name or None, limit=limit or LIMIT_MAX, token=token or None)


def _network(given: NetworkConfig | None, internet: bool | None) -> Network:
    shown = None if given is None else given.model_dump(exclude_none=True) or None
    public = given is None or given.allowPublicTraffic is not False
    if given is not None and given.maskRequestHost:
        masking.check(given.maskRequestHost)
    return Network(public=public, internet=internet, given=shown, policy=parse(shown, internet))


def egress(given: NetworkUpdate) -> Network:
    """What a sandbox is to be allowed to reach from now on.

    Raises:
        InvalidRequest: a rule cannot be right.
    """
    shown = given.model_dump(exclude_none=True, exclude={"allow_internet_access"}) or None
    internet = given.allow_internet_access
    return Network(internet=internet, given=shown, policy=parse(shown, internet))


def idempotency_key(value: str | None, body: CreateBody, project: str) -> Key | None:
    """The key of a create call, bound to what the call asked for; each project has its own.

    Raises:
        InvalidRequest: it is not 1 to 255 lowercase letters, digits and hyphens.
    """
    if value is None:
        return None
    if _KEY.fullmatch(value) is None:
        raise InvalidRequest("Idempotency-Key must be 1 to 255 lowercase letters, digits and hyphens")
    request = f"{type(body).__name__} {body.model_dump_json(exclude_unset=True)}"
    return Key(f"{project}/{value}", hashlib.sha256(request.encode()).hexdigest())


def metadata_filter(value: str | None) -> dict[str, str]:
    """The pairs of a metadata query, of which the framework has undone one level of encoding.

    E2B's clients encode keys and values, then the pairs, then the query (e2b-surface, metadata query).
    """
    if not value:
        return {}
    pairs = (part.partition("=") for part in unquote(value).split("&") if part)
    return {unquote(key): unquote(content) for key, _, content in pairs}


def list_query(
    *,
    metadata: str | None,
    states: list[str] | None,
    order: str | None,
    started_after: str | None,
    template: str | None,
    limit: int | None,
    token: str | None,
) -> Query:
    """What a v2 list call asks for.

    Raises:
        InvalidRequest: a value is not allowed.
    """
    chosen = frozenset(part for each in states or [] for part in each.split(",") if part)
    if not chosen <= _STATES:
        raise InvalidRequest(f"state: {', '.join(sorted(chosen - _STATES))} is none of running, paused")
    if order not in (None, "", "asc", "desc"):
        raise InvalidRequest(f"order: {order!r} is none of asc, desc")
    if limit is not None and not 1 <= limit <= LIMIT_MAX:
        raise InvalidRequest(f"limit: must be 1 to {LIMIT_MAX}, is {limit}")
    return Query(
        states=chosen or _STATES,
        metadata=metadata_filter(metadata),
        template=template or None,
        started_after=timestamp(started_after) if started_after else None,
        ascending=order == "asc",
        limit=limit or LIMIT_MAX,
        token=token or None,
    )


def timestamp(text: str) -> float:
    """An RFC 3339 time as seconds since the epoch; without a zone it is UTC."""
    try:
        # an unencoded "+" of the zone arrives as a space
        moment = datetime.fromisoformat(text.strip().replace(" ", "+") if "T" in text else text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest(f"startedAfter: {text!r} is not an RFC 3339 time") from None
