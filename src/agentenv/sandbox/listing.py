"""Which sandboxes a list shows, in which order, and where its next page begins."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from agentenv.errors import InvalidRequest
from agentenv.sandbox.records import Sandbox
from agentenv.sandbox.transitions import SHOWN

LIMIT_MAX = 100


@dataclass(frozen=True)
class Query:
    """What to list. `states` holds "running" and "paused", `token` where the page before ended; without
    `project`, those of all."""

    states: frozenset[str] = frozenset({"running", "paused"})
    metadata: dict[str, str] = field(default_factory=dict)
    template: str | None = None
    started_after: float | None = None
    ascending: bool = False
    limit: int | None = LIMIT_MAX
    token: str | None = None
    project: str | None = None


@dataclass(frozen=True)
class Page:
    """Sandboxes, the token of the next page if there is one, and how many of all matching run."""

    sandboxes: list[Sandbox]
    next_token: str | None
    total_running: int


def select(sandboxes: Iterable[Sandbox], query: Query) -> Page:
    """The page that `query` asks for.

    Raises:
        InvalidRequest: its token is not one that this function made.
    """
    shown = sorted(
        (each for each in sandboxes if _matches(each, query)),
        key=_position,
        reverse=not query.ascending,
    )
    running = sum(SHOWN.get(each.state) == "running" for each in shown)
    if query.token:
        last = _position_of(query.token)
        shown = [
            each for each in shown if (_position(each) > last) == query.ascending and _position(each) != last
        ]
    page = shown if query.limit is None else shown[: query.limit]
    more = len(page) < len(shown)
    return Page(page, _token(page[-1]) if more and page else None, running)


def _matches(sandbox: Sandbox, query: Query) -> bool:
    return (
        SHOWN.get(sandbox.state) in query.states
        and query.project in (None, sandbox.project)
        and all(sandbox.metadata.get(key) == value for key, value in query.metadata.items())
        and (query.template is None or query.template in (sandbox.template.id, sandbox.template.name))
        # E2B's clients expect one that started at that very time, which they were told to the microsecond.
        and (query.started_after is None or sandbox.started_at >= query.started_after - 1e-6)
    )


def _position(sandbox: Sandbox) -> tuple[float, str]:
    return sandbox.started_at, sandbox.id


def _token(sandbox: Sandbox) -> str:
    return base64.urlsafe_b64encode(json.dumps(_position(sandbox)).encode()).decode().rstrip("=")


def _position_of(token: str) -> tuple[float, str]:
    try:
        started_at, sandbox_id = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return float(started_at), str(sandbox_id)
    except (ValueError, TypeError):
        raise InvalidRequest("nextToken is not one that this node gave out") from None
