"""Notes in the audit log what changed something, with who asked and what came of it."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentenv.api.accounting import UNMATCHED
from agentenv.context import REQUEST_ID
from agentenv.identity.audit import Audit
from agentenv.identity.caller import CALLER

LOOKING = frozenset({"GET", "HEAD", "OPTIONS"})


class Auditing:
    """Around the routes, within the gate; refusals by the gate are in the node's metrics alone."""

    def __init__(self, app: ASGIApp, audit: Audit) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in LOOKING:
            await self._app(scope, receive, send)
            return
        answer: list[Message] = []

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.append(message)
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            self._note(scope, answer[0] if answer else None)

    def _note(self, scope: Scope, answer: Message | None) -> None:
        caller = CALLER.get()
        made = None if answer is None else Headers(raw=answer["headers"]).get("x-agentenv-sandbox-id")
        self._audit.note(
            key=caller.name if caller.key_id else None,  # an upload has a ticket instead
            key_id=caller.key_id or None,
            project=caller.project if caller.key_id else None,
            client=(scope.get("client") or ("",))[0],
            method=scope["method"],
            route=getattr(scope.get("route"), "path", UNMATCHED),
            target=scope.get("path_params") or None,
            made=made,
            status=500 if answer is None else answer["status"],
            request_id=REQUEST_ID.get() or None,
        )
