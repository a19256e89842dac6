"""Which snapshots a list shows, and where its next page begins: newest first."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass

from agentenv.errors import InvalidRequest
from agentenv.snapshot.names import matches
from agentenv.snapshot.records import Kind, Snapshot

LIMIT_MAX = 100


@dataclass(frozen=True)
class Query:
    """What to list. `name` may be an id, a name, or a name with a tag; `token` tells where the page
    before ended; without `project`, those of all are listed."""

    sandbox_id: str | None = None
    name: str | None = None
    kinds: frozenset[Kind] = frozenset({"checkpoint"})
    limit: int | None = LIMIT_MAX
    token: str | None = None
    project: str | None = None


@dataclass(frozen=True)
class Page:
    """Snapshots, and the token of the next page if there is one."""

    snapshots: tuple[Snapshot, ...]
    next_token: str | None


def select(records: Iterable[Snapshot], query: Query) -> Page:
    """The page that `query` asks for.

    Raises:
        InvalidRequest: its token is not one that this function made.
    """
    shown = sorted((each for each in records if _matches(each, query)), key=_position, reverse=True)
    if query.token:
        last = _position_of(query.token)
        shown = [each for each in shown if _position(each) < last]
    page = tuple(shown if query.limit is None else shown[: query.limit])
    more = bool(page) and len(page) < len(shown)
    return Page(page, _token(page[-1]) if more else None)


def _matches(record: Snapshot, query: Query) -> bool:
    return (
        record.deleted_at is None
        and record.kind in query.kinds
        and query.project in (None, record.project)
        and (query.sandbox_id is None or record.sandbox_id == query.sandbox_id)
        and (
            query.name is None
            or matches(query.name, record.id)
            or any(matches(name, query.name) for name in record.names)
        )
    )


def _position(record: Snapshot) -> tuple[float, str]:
    return record.created_at, record.id


def _token(record: Snapshot) -> str:
    return base64.urlsafe_b64encode(json.dumps(_position(record)).encode()).decode().rstrip("=")


def _position_of(token: str) -> tuple[float, str]:
    try:
        created_at, snapshot_id = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return float(created_at), str(snapshot_id)
    except (ValueError, TypeError):
        raise InvalidRequest("nextToken is not one that this node gave out") from None
