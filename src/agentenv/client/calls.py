"""The calls that E2B's client lacks, as data: method, path, body, and how the answer is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from agentenv.client import answers
from agentenv.client.answers import Made, Operation, Refused, Snapshot, Tree
from agentenv.limits import Limits, spelled

T = TypeVar("T")

Variables = Mapping[str, str]
EachOrAll = Variables | Sequence[Variables] | None
"""The same for all of many, or one for each, in their order."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request to a node's control plane. `read` makes the answer of its JSON, which is None where the
    answer has no body; a status of 400 or more is not for it."""

    method: str
    path: str
    read: Callable[[Any], T]
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def create(wanted: Mapping[str, Any], idempotency_key: str | None = None) -> Call[Made]:
    """Start a sandbox; `wanted` is the body, with the API's names."""
    headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
    return Call("POST", "/v2/sandboxes", answers.made, wanted, headers)


def batch(
    wanted: Mapping[str, Any], count: int | None, envs: EachOrAll = None, metadata: EachOrAll = None
) -> Call[list[Made | Refused]]:
    """Start many of one template or snapshot; each succeeds or fails for itself.

    Raises:
        ValueError: as `children`.
    """
    body = {**wanted, **children(count, envs, metadata)}
    return Call("POST", "/sandboxes/batch", answers.many, body)


def fork(
    sandbox_id: str,
    count: int | None = None,
    *,
    envs: EachOrAll = None,
    metadata: EachOrAll = None,
    timeout_s: int | None = None,
) -> Call[list[Made | Refused]]:
    """Start children that go on from where a sandbox is; each succeeds or fails for itself.

    Raises:
        ValueError: as `children`.
    """
    body = children(count, envs, metadata)
    if timeout_s is not None:
        body["timeout"] = timeout_s
    return Call("POST", _sandbox(sandbox_id, "/fork"), answers.many, body)


def rollback(sandbox_id: str, snapshot_id: str | None = None) -> Call[Made]:
    """Put a sandbox back to one of its snapshots; None is its start."""
    body = {} if snapshot_id is None else {"snapshotID": snapshot_id}
    return Call("POST", _sandbox(sandbox_id, "/rollback"), answers.made, body)


def tree(sandbox_id: str) -> Call[Tree]:
    """The snapshots of a sandbox."""
    return Call("GET", _sandbox(sandbox_id, "/tree"), answers.tree)


def lineage(snapshot_id: str) -> Call[Snapshot]:
    """A snapshot, by id or name, with its parent and children."""
    return Call("GET", f"/snapshots/{quote(snapshot_id, safe='')}", answers.snapshot)


def operations(sandbox_id: str) -> Call[list[Operation]]:
    """What the last operations on a sandbox spent their time on."""
    return Call("GET", _sandbox(sandbox_id, "/operations"), answers.operations)


def limits(sandbox_id: str) -> Call[Limits]:
    """How fast a sandbox may be."""
    return Call("GET", _sandbox(sandbox_id), answers.limits)


def set_limits(sandbox_id: str, wanted: Limits) -> Call[None]:
    """Have these in the place of all of before; what is None is the node's default, 0 is no limit."""
    return Call("PUT", _sandbox(sandbox_id, "/limits"), _nothing, limits_body(wanted))


def give_back_memory(sandbox_id: str) -> Call[None]:
    """Have a sandbox start anew in place, without the memory that it changed; it goes on."""
    return Call("POST", _sandbox(sandbox_id, "/refresh-memory"), _nothing)


def children(count: int | None, envs: EachOrAll, metadata: EachOrAll) -> dict[str, Any]:
    """The part of a body that says how many, and what each has of its own.

    Raises:
        ValueError: there is one for each, but not of the number that is wanted.
    """
    lengths = {len(each) for each in (envs, metadata) if each is not None and not isinstance(each, Mapping)}
    number = count if count is not None else max(lengths, default=1)
    if lengths - {number}:
        raise ValueError(f"{number} are wanted, and envs or metadata are for {sorted(lengths - {number})[0]}")
    rows = zip(_each(envs, number), _each(metadata, number), strict=True)
    own = [{"envVars": dict(env), "metadata": dict(data)} for env, data in rows]
    return {"count": number, "children": own} if envs or metadata else {"count": number}


def _each(given: EachOrAll, number: int) -> Sequence[Variables]:
    if given is None or isinstance(given, Mapping):
        return [given or {}] * number
    return given


def limits_body(wanted: Limits) -> dict[str, dict[str, int]]:
    """Limits with the API's names."""
    return {
        part: {spelled(name): value for name, value in values.items() if value is not None}
        for part, values in asdict(wanted).items()
    }


def _sandbox(sandbox_id: str, rest: str = "") -> str:
    return f"/sandboxes/{quote(sandbox_id, safe='')}{rest}"


def _nothing(_: Any) -> None:
    return None
