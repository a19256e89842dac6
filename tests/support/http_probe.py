"""A server with a few handlers that show what the HTTP layer does; run as a script it serves."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator


@contextlib.contextmanager
def probe_server() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Its port and process, for the time of the block."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", __file__], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process
        finally:
            process.kill()


def _serve() -> None:
    import os
    import tempfile

    from agentenv.guest import connect, http, loop
    from agentenv.guest.http import FileSpan, Request, Response
    from agentenv.guest.server import Server

    router = http.Router()
    left = loop.Event()

    async def echo(request: Request) -> Response:
        body = await request.read(10_000_000)
        return http.json_response({"method": request.method, "size": len(body), "peer": request.peer})

    async def ignore(request: Request) -> Response:
        return Response(200, b"ignored")

    async def empty(request: Request) -> Response:
        return Response(200)

    async def nothing(request: Request) -> Response:
        return Response(204)

    async def mirror(request: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            yield b""
            while chunk := await request.next_chunk():
                yield chunk

        return Response(200, body(), "text/plain")

    async def sized(request: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            yield b"abc"
            yield b"def"

        return Response(200, body(), length=6)

    async def endless(request: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            try:
                yield b"begun"
                await loop.Event().wait()
            finally:
                left.set()

        return Response(200, body())

    async def wait_left(request: Request) -> Response:
        return http.json_response(await left.wait(10))

    async def breaks(request: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            yield b"half"
            raise RuntimeError("broken on purpose")

        return Response(200, body())

    async def fails(request: Request) -> Response:
        raise RuntimeError("fails on purpose")

    async def span(request: Request) -> Response:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(1000) + b"x" * 3_000_000)
            file.flush()
            return Response(200, FileSpan(os.dup(file.fileno()), 1000, 3_000_000))

    async def descriptors(request: Request) -> Response:
        return http.json_response(len(os.listdir("/proc/self/fd")))

    async def stream(message: connect.Message, request: Request) -> AsyncIterator[connect.Message]:
        for number in range(connect.int_field(message, "count")):
            yield {"number": number}
        if connect.flag_field(message, "fail"):
            raise connect.ConnectError("failed_precondition", "asked to")
        if connect.flag_field(message, "crash"):
            raise RuntimeError("crashes on purpose")

    async def add(message: connect.Message, request: Request) -> connect.Message:
        return {"sum": connect.int_field(message, "oneNumber") + connect.int_field(message, "two")}

    async def total(messages: AsyncIterator[connect.Message], request: Request) -> connect.Message:
        return {"sum": sum([connect.int_field(message, "n") async for message in messages])}

    for method, path, handler in (
        ("POST", "/echo", echo),
        ("GET", "/echo", echo),
        ("POST", "/ignore", ignore),
        ("GET", "/empty", empty),
        ("GET", "/nothing", nothing),
        ("POST", "/mirror", mirror),
        ("GET", "/sized", sized),
        ("GET", "/endless", endless),
        ("GET", "/left", wait_left),
        ("GET", "/breaks", breaks),
        ("GET", "/fails", fails),
        ("GET", "/span", span),
        ("GET", "/descriptors", descriptors),
    ):
        router.add(method, path, handler)
    connect.server_stream(router, "/s", stream)
    connect.unary(router, "/u", add)
    connect.client_stream(router, "/c", total)

    async def main() -> None:
        print(Server(router).listen("127.0.0.1", 0), flush=True)
        await loop.Event().wait()

    loop.run(main())


if __name__ == "__main__":
    _serve()
