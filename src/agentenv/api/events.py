"""Events of the node: followed as a stream (server-sent events), and listed as E2B does."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import Annotated, Any
from weakref import WeakSet

from fastapi import APIRouter, Header, Query, Response
from starlette.types import Receive, Scope, Send

from agentenv.api import answers
from agentenv.api.models import Given, rfc3339
from agentenv.api.projects import Projects
from agentenv.errors import InvalidRequest
from agentenv.identity.caller import CALLER
from agentenv.identity.keys import Keys
from agentenv.observe.events import BUILD_KINDS, LOST, SANDBOX, Event, Events, Filter, Follower
from agentenv.sandbox.observing import Change

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0  # proxies on the way close what is silent for a minute
LAST_WORDS_S = 1.0
KINDS = frozenset(map(str, Change)) | frozenset(BUILD_KINDS.values())

# E2B's lifecycle events (its documentation, "Monitor sandbox lifecycle events").
_PREFIX = "sandbox.lifecycle."
_E2B_TYPES = {
    Change.CREATED: "created",
    Change.UPDATED: "updated",
    Change.PAUSED: "paused",
    Change.RESUMED: "resumed",
    Change.CHECKPOINTED: "checkpointed",
    Change.KILLED: "killed",
    Change.EXPIRED: "killed",
    Change.FAILED: "killed",
}

Several = Annotated[list[str] | None, Query()]


class LifecycleEvent(Given):
    """An event as E2B lists it. What E2B has and a node has not is empty."""

    version: str = "v2"
    id: str
    type: str
    eventData: dict[str, Any]
    sandboxBuildId: str
    sandboxExecutionId: str
    sandboxId: str
    sandboxTeamId: str = ""
    sandboxTemplateId: str
    timestamp: str


def routes(events: Events, projects: Projects, keys: Keys) -> APIRouter:
    """The stream and the lists."""
    streams = Streams(events)
    keys.on_revoked(streams.end)
    router = APIRouter(tags=["observability"])

    @router.get("/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
    async def follow(
        sandbox_id: Several = None,
        kind: Several = None,
        after: str | None = None,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        """Follow what happens, as server-sent events: each has an `id`, its kind as `event`, and an object as
        `data`. With the id of an event, in `Last-Event-ID` or `after`, those since come first; one of the
        kind `lost` comes before them where some are not known any more."""
        wanted = Filter(_names(sandbox_id), _kinds(kind), projects.current)
        return streams.of(CALLER.get().key_id, events.follow(wanted, last_event_id or after))

    @router.get("/events/sandboxes", response_model=list[LifecycleEvent])
    async def of_all(
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=100)] = 10,
        orderAsc: bool = False,
        types: Several = None,
    ) -> Response:
        """The lives of all sandboxes lately, the newest first unless `orderAsc`."""
        its = (event for event in events.newest_first() if event.project == projects.current)
        return answers.json(_listed(its, offset, limit, orderAsc, _names(types)))

    @router.get("/events/sandboxes/{sandbox_id}", response_model=list[LifecycleEvent])
    async def of_one(
        sandbox_id: str,
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=100)] = 10,
        orderAsc: bool = False,
        types: Several = None,
    ) -> Response:
        """The life of one sandbox."""
        its = (
            event
            for event in events.newest_first()
            if (event.sandbox_id, event.project) == (sandbox_id, projects.current)
        )
        return answers.json(_listed(its, offset, limit, orderAsc, _names(types)))

    return router


class Streams:
    """The streams that are open, by the keys that opened them."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._open: dict[str, WeakSet[Follower]] = {}

    def of(self, key_id: str, follower: Follower) -> EventStream:
        """A stream of what a follower reads."""
        self._open.setdefault(key_id, WeakSet()).add(follower)
        return EventStream(self._events, follower)

    def end(self, key_id: str) -> None:
        """End those of a key that does not hold any more."""
        for follower in self._open.pop(key_id, ()):
            follower.close()


class EventStream(Response):
    """Server-sent events (HTML living standard, 9.2) to one client, until it goes or is too slow."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, follower: Follower) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._follower = follower

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send), name="event stream")
        leaving = asyncio.create_task(_gone(receive))
        over = asyncio.create_task(self._follower.closed.wait())
        try:
            await asyncio.wait({writing, leaving, over}, return_when=asyncio.FIRST_COMPLETED)
            if over.done() and not self._follower.cut:  # a client that reads sees an orderly end
                await asyncio.wait({writing}, timeout=LAST_WORDS_S)
            if writing.done():
                writing.result()
        finally:
            if self._follower.cut:
                log.info("a client that follows the events is too slow for them: cut off")
            self._events.leave(self._follower)
            for task in (writing, leaving, over):
                task.cancel()
            await asyncio.gather(writing, leaving, over, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        first = f"event: {LOST}\ndata: {{}}\n\n" if self._follower.lost else ": following\n\n"
        await _send(send, first)
        while not self._follower.closed.is_set():
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    found = await self._follower.read()
            except TimeoutError:
                await _send(send, ":\n\n")
                continue
            for event in found:
                await _send(send, told(event))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def told(event: Event) -> str:
    """An event as it is sent."""
    document = {
        "id": event.id,
        "timestamp": rfc3339(event.at),
        "about": event.about,
        "kind": event.kind,
        "templateID": event.template_id,
        "buildID": event.build_id,
        "state": event.state,
        "detail": dict(event.detail),
    }
    if event.about == SANDBOX:
        document |= {"sandboxID": event.sandbox_id, "metadata": dict(event.metadata)}
    return f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(document)}\n\n"


def _names(given: list[str] | None) -> frozenset[str]:
    return frozenset(name for each in given or [] for name in each.split(",") if name)


def _kinds(given: list[str] | None) -> frozenset[str]:
    names = _names(given)
    if not names <= KINDS:
        raise InvalidRequest(
            f"kind: {', '.join(sorted(names - KINDS))} is none of {', '.join(sorted(KINDS))}"
        )
    return names


def _listed(
    newest_first: Iterable[Event], offset: int, limit: int, ascending: bool, types: frozenset[str]
) -> list[LifecycleEvent]:
    shown = [
        found
        for event in newest_first
        if (found := _lifecycle(event)) is not None and (not types or found.type in types)
    ]
    ordered = shown[::-1] if ascending else shown
    return ordered[offset : offset + limit]


def _lifecycle(event: Event) -> LifecycleEvent | None:
    if event.about != SANDBOX or (name := _E2B_TYPES.get(Change(event.kind))) is None:
        return None
    return LifecycleEvent(
        id=event.id,
        type=_PREFIX + name,
        eventData={"sandbox_metadata": dict(event.metadata), **event.detail},
        sandboxBuildId=event.build_id,
        sandboxExecutionId=event.sandbox_id,
        sandboxId=event.sandbox_id,
        sandboxTemplateId=event.template_id,
        timestamp=rfc3339(event.at),
    )
