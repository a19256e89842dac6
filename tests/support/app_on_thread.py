"""An application served over HTTP on a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

import uvicorn
from starlette.types import ASGIApp

Making = Callable[[], AbstractAsyncContextManager[ASGIApp]]


@contextmanager
def served(making: Making) -> Iterator[str]:
    """The URL of the application that `making` gives; it is made, served and ended on that thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    failures: list[BaseException] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with making() as app:
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
            serving = asyncio.create_task(server.serve([listener]))
            while not server.started:
                await asyncio.sleep(0.01)  # uvicorn has no event for it
            ready.set()
            await stop.wait()
            server.should_exit = True
            await serving

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # told by the test's thread
            failures.append(error)
            ready.set()

    thread = threading.Thread(target=run, name="served")
    thread.start()
    try:
        assert ready.wait(30)
        if failures:
            raise failures[0]
        host, port = listener.getsockname()
        yield f"http://{host}:{port}"
    finally:
        if loops and thread.is_alive():
            loops[0].call_soon_threadsafe(stop.set)
        thread.join(30)
        listener.close()
