"""The HTTP interface: `/health`, `/execute`, `/contexts`, as E2B's code interpreter clients call it; and
`/rehearse`, for a machine that is held ready."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentenv.interpreter import messages
from agentenv.interpreter.contexts import CannotStart, Context, Contexts, NoSuchContext
from agentenv.interpreter.messages import Line

KEEPALIVE_S = 5.0
PREPARED = ("python", "javascript")  # contexts that are there from the start, where their kernels are


class BadRequest(Exception):
    """A body that cannot be."""


def application(contexts: Contexts, prepared: Collection[str] = PREPARED) -> Starlette:
    """The server over these contexts; those of the languages `prepared` are ready before it serves."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        try:
            await contexts.prepare(prepared)
            yield
        finally:
            await contexts.end()

    async def health(_request: Request) -> Response:
        return JSONResponse("OK")

    async def execute(request: Request) -> Response:
        body = await _body(request)
        code, given = _text(body, "code"), _variables(body.get("env_vars"))
        if code is None:
            raise BadRequest("there is no code")
        identifier, language = _text(body, "context_id"), _text(body, "language")
        if identifier and language:
            raise BadRequest("Only one of context_id or language can be provided")
        context = contexts.get(identifier) if identifier else await contexts.default(language)
        common = await contexts.variables(request.headers.get("X-Access-Token"))
        return Lines(context.execute(code, given, common))

    async def rehearse(_request: Request) -> Response:
        return Lines(contexts.rehearse())

    async def create(request: Request) -> Response:
        body = await _body(request)
        return JSONResponse(_shown(await contexts.create(_text(body, "language"), _text(body, "cwd"))))

    async def list_all(_request: Request) -> Response:
        return JSONResponse([_shown(context) for context in contexts.list()])

    async def restart(request: Request) -> Response:
        await contexts.restart(request.path_params["context_id"])
        return JSONResponse(None)

    async def remove(request: Request) -> Response:
        await contexts.remove(request.path_params["context_id"])
        return JSONResponse(None)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/execute", execute, methods=["POST"]),
            Route("/rehearse", rehearse, methods=["POST"]),
            Route("/contexts", create, methods=["POST"]),
            Route("/contexts", list_all),
            Route("/contexts/{context_id}/restart", restart, methods=["POST"]),
            Route("/contexts/{context_id}", remove, methods=["DELETE"]),
        ],
        middleware=[
            Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
        ],
        exception_handlers={BadRequest: _answer(400), NoSuchContext: _answer(404), CannotStart: _answer(500)},
        lifespan=lifespan,
    )


class Lines(Response):
    """Lines of JSON as they come, and one now and then when none comes; reading ends with the client."""

    media_type = "application/json"

    def __init__(self, lines: AsyncGenerator[Line, None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        telling = asyncio.create_task(self._tell(send))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((telling, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (telling, leaving):
                task.cancel()
            await asyncio.gather(telling, leaving, return_exceptions=True)
        if not telling.cancelled() and (error := telling.exception()) is not None:
            raise error

    async def _tell(self, send: Send) -> None:
        async with aclosing(_with_keepalives(self._lines)) as lines:
            async for line in lines:
                await send({"type": "http.response.body", "body": _encoded(line), "more_body": True})
        await send({"type": "http.response.body", "body": _encoded(messages.END), "more_body": False})


async def _with_keepalives(lines: AsyncGenerator[Line, None]) -> AsyncGenerator[Line, None]:
    awaited: asyncio.Task[Line] | None = None
    try:
        while True:
            if awaited is None:
                awaited = asyncio.ensure_future(_next(lines))
            done, _ = await asyncio.wait((awaited,), timeout=KEEPALIVE_S)
            if not done:
                yield messages.KEEPALIVE
                continue
            try:
                line = awaited.result()
            except StopAsyncIteration:
                return
            awaited = None
            yield line
    finally:
        if awaited is not None:
            awaited.cancel()
            await asyncio.gather(awaited, return_exceptions=True)
        await lines.aclose()


async def _next(lines: AsyncIterator[Line]) -> Line:
    return await anext(lines)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _encoded(line: Line) -> bytes:
    return json.dumps(line, default=str).encode() + b"\n"


def _shown(context: Context) -> dict[str, str]:
    return {"id": context.id, "language": context.language, "cwd": context.cwd}


def _answer(status: int) -> Callable[[Request, Exception], Response]:
    def answer(_request: Request, error: Exception) -> Response:
        return PlainTextResponse(str(error), status)

    return answer


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body() or b"{}")
    except ValueError:
        raise BadRequest("the body is not JSON") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not an object")
    return body


def _text(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{name} is not text")
    return value


def _variables(given: object) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise BadRequest("env_vars are not texts by name")
    return given
