"""What every request passes before it is routed: the API key, and a bound on its body."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentenv.api.faults import fault

OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json", "/docs"})
# Uploads carry a ticket instead of the key, and are bounded where they are stored.
UPLOADS = "/uploads/"
BODY_LIMIT_BYTES = 1024 * 1024


class KeyGate:
    """Lets requests with the right `X-API-KEY` pass, and those to `OPEN_PATHS` and of uploads."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope) or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        answer = fault(401, "the X-API-KEY header is missing, repeated or wrong")
        await answer(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"x-api-key"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._key)


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
