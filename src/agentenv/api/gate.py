"""What every request passes before it is routed: the API key, and a bound on its body."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentenv.api.faults import fault
from agentenv.identity.caller import CALLER, Caller
from agentenv.identity.keys import Keys
from agentenv.identity.rates import Rates

OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json", "/docs"})
# Uploads carry a ticket instead of the key, and are bounded where they are stored.
UPLOADS = "/uploads/"
BODY_LIMIT_BYTES = 1024 * 1024


# An admin's choice of another project than the key's own.
PROJECT = b"x-agentenv-project"
# Control-plane paths below which only admins come.
ADMINS = ("/api-keys", "/metrics/sandboxes")


class KeyGate:
    """Lets requests with an `X-API-KEY` that holds pass, as often as it may ask; and without one those to
    `OPEN_PATHS` and of uploads. What is done is done as the key's `Caller`."""

    def __init__(self, app: ASGIApp, keys: Keys, rates: Rates) -> None:
        self._app = app
        self._keys = keys
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        found = self._caller(scope)
        if not isinstance(found, Caller):
            await found(scope, receive, send)
            return
        token = CALLER.set(found)
        try:
            await self._app(scope, receive, send)
        finally:
            CALLER.reset(token)

    def _caller(self, scope: Scope) -> Caller | ASGIApp:
        """Who asks, or the answer to one who may not."""
        given = [value for name, value in scope["headers"] if name == b"x-api-key"]
        key = self._keys.find(given[0]) if len(given) == 1 else None
        if key is None:
            return fault(401, "the X-API-KEY header is missing, repeated or wrong")
        if key.rate is not None and (wait_s := self._rates.take(key.id, key.rate)):
            rate = f"{key.rate.per_second:g} requests per second"
            return fault(429, f"this API key may make {rate}", retry=True, retry_after=wait_s)
        wanted = Headers(scope=scope).get(PROJECT.decode())
        if wanted is not None and wanted != key.project:
            if not key.is_admin:
                return fault(403, "X-AgentENV-Project: only an admin's key acts for other projects")
            if wanted not in self._keys.projects:
                return fault(404, f"there is no project {wanted!r}")
        if not key.is_admin and str(scope["path"]).startswith(ADMINS):
            return fault(403, "this takes an API key with the scope admin")
        return Caller.of(key, wanted)


class BodyBound:
    """Refuses bodies above a limit, declared or not, and has every body read as JSON.

    E2B's own server does not look at the content type either.
    """

    def __init__(self, app: ASGIApp, limit_bytes: int = BODY_LIMIT_BYTES) -> None:
        self._app = app
        self._limit = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_upload(scope):
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limit:
            await self._refusal()(scope, receive, send)
            return
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise HTTPException(413, self._message, headers={"Connection": "close"})
            return message

        await self._app({**scope, "headers": _as_json(scope["headers"])}, bounded, send)

    @property
    def _message(self) -> str:
        return f"the body is larger than {self._limit} bytes"

    def _refusal(self) -> ASGIApp:
        answer = fault(413, self._message)
        answer.headers["Connection"] = "close"
        return answer


def _is_open(scope: Scope) -> bool:
    return scope["path"] in OPEN_PATHS or _is_upload(scope)


def _is_upload(scope: Scope) -> bool:
    return scope["method"] == "PUT" and str(scope["path"]).startswith(UPLOADS)


def _as_json(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    rest = [(name, value) for name, value in headers if name != b"content-type"]
    return [*rest, (b"content-type", b"application/json")]
