"""What every request of the control plane passes first and last: it gets an id, and its answer is counted."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentenv.context import REQUEST_ID
from agentenv.observe.traces import Call, Traces

HEADER = "X-Request-Id"
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_NOTED = "agentenv.noted"
# Routes that nobody made are one, and so are methods: what clients think up must not become metrics.
UNMATCHED = "unmatched"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

Answered = Callable[[str, str, int, float], None]
"""Told of an answer, when that is over: method, route, status, and seconds until it began."""


class Accounting:
    """The outermost: an id for each request, given or made, which its answer has too. `answered` is
    told of that."""

    def __init__(self, app: ASGIApp, answered: Answered | None = None, traces: Traces | None = None) -> None:
        self._app = app
        self._answered = answered
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        token = REQUEST_ID.set(request_id(headers.get(HEADER)))
        try:
            method = scope["method"] if scope["method"] in METHODS else "other"
            if self._traces is None:
                await self._pass(scope, receive, send, method, None)
                return
            with self._traces.call(method, headers) as call:
                await self._pass(scope, receive, send, method, call)
        finally:
            REQUEST_ID.reset(token)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, method: str, call: Call | None) -> None:
        begun, name = time.perf_counter(), REQUEST_ID.get()
        noted: dict[str, str] = {}
        began: list[tuple[int, float]] = []

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                began.append((message["status"], time.perf_counter() - begun))
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        try:
            await self._app({**scope, _NOTED: noted}, receive, named)
        finally:
            status, seconds = began[0] if began else (500, time.perf_counter() - begun)
            route = noted.get("route", UNMATCHED)
            if self._answered is not None:
                self._answered(method, route, status, seconds)
            if call is not None:
                call.answered(route, status)


def request_id(given: str | None) -> str:
    """The id that a client gave, if it can be one, else a new one."""
    return given if given and _ID.fullmatch(given) else secrets.token_hex(8)


class Routed:
    """The innermost: notes which route a request came to."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            noted, route = scope.get(_NOTED), scope.get("route")
            if noted is not None and route is not None:
                noted["route"] = str(getattr(route, "path", UNMATCHED))
