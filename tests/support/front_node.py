"""A real uvicorn with the front before a small API, guests as servers on loopback, raw clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn

from agentenv.proxy.directory import Asleep, Guard, Route
from agentenv.proxy.front import Front
from agentenv.proxy.plane import DataPlane

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

API_KEY = "e2b_0123456789"


class Sandboxes:
    """A directory that tests fill by hand."""

    def __init__(self) -> None:
        self.routes: dict[str, Route] = {}
        self.signatures: dict[str, str] = {}
        self.sleepers: dict[str, Asleep] = {}
        self.guards: dict[str, Guard] = {}
        self.woken: list[str] = []
        self.wakes = asyncio.Event()
        self.asked: list[tuple[str, str, str, str, str | None]] = []

    def add(
        self,
        sandbox_id: str,
        generation: int = 1,
        public: bool = True,
        token: str | None = None,
        mask_host: str | None = None,
    ) -> Route:
        route = Route(sandbox_id, generation, "127.0.0.1", "access", token, public, mask_host)
        self.routes[sandbox_id] = route
        return route

    def route(self, sandbox_id: str) -> Route | None:
        return self.routes.get(sandbox_id)

    def asleep(self, sandbox_id: str) -> Asleep | None:
        return self.sleepers.get(sandbox_id)

    def guard(self, sandbox_id: str) -> Guard | None:
        return self.guards.get(sandbox_id, Guard("", None, True))

    async def wake(self, sandbox_id: str) -> None:
        self.woken.append(sandbox_id)
        await self.wakes.wait()
        self.sleepers.pop(sandbox_id, None)

    def by_signature(
        self, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route | str | None:
        self.asked.append((path, operation, username, signature, expiration))
        signer = self.signatures.get(signature, "")
        return signer if self.sleepers.get(signer) == "wakes" else self.routes.get(signer)


async def api(
    scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Any]
) -> None:
    """Answers with what it was asked, `/early` before the body has come."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        message = await receive()
        await send({"type": "websocket.send", "text": "api:" + message["text"]})
        await send({"type": "websocket.close"})
        return
    assert scope["type"] == "http"
    length = 0
    if scope["path"] != "/early":
        while True:
            event = await receive()
            length += len(event.get("body", b""))
            if not event.get("more_body"):
                break
    body = json.dumps({"api": scope["path"], "method": scope["method"], "bytes": length}).encode()
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class Node:
    """A running front."""

    port: int
    sandboxes: Sandboxes
    front: type[Front]
    server: uvicorn.Server
    plane: DataPlane
    serving: asyncio.Task[None]
    guests: list[asyncio.Server] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def limit(self, **limits: float) -> None:
        """Change limits of the data plane."""
        self.plane.limits = replace(self.plane.limits, **limits)  # type: ignore[arg-type]

    async def guest(self, handler: Handler, port: int = 0) -> int:
        """Serve as a guest on that or a free port; returns that."""

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self.tasks.append(task)
            try:
                await handler(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass  # what the test does to the other side, and its end
            finally:
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", port)
        self.guests.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End the server and the guests."""
        self.server.should_exit = True
        await self.serving
        self.plane.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks)
        for guest in self.guests:
            guest.close()
            await guest.wait_closed()
        await asyncio.sleep(0)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A raw connection to the front."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def head_for(sandbox_id: str, port: int, path: str = "/", method: str = "GET", *fields: str) -> bytes:
    """A request's head with the routing headers."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        f"E2b-Sandbox-Id: {sandbox_id}",
        f"E2b-Sandbox-Port: {port}",
        *fields,
    ]
    return "".join(line + "\r\n" for line in lines).encode() + b"\r\n"


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """A message's head with its empty line."""
    return await reader.readuntil(b"\r\n\r\n")


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer that is framed by Content-Length or has no body."""
    start, *lines = (await read_head(reader)).decode().split("\r\n")
    parts = [line.partition(":") for line in lines if line]
    fields = {name.lower(): value.strip() for name, _, value in parts}
    return int(start.split()[1]), fields, await reader.readexactly(int(fields.get("content-length", 0)))
