"""The guest agent's file services in a process of their own, on the host.

Run as a script it serves: the first argument is JSON with `token`, `user` and `workdir`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def file_agent(*, token: str | None = None, user: str = "root", workdir: str | None = None) -> Iterator[str]:
    """A served agent's base URL, for the time of the block."""
    settings = json.dumps({"token": token, "user": user, "workdir": workdir})
    with subprocess.Popen(
        [sys.executable, "-W", "error", __file__, settings], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def _serve(settings: dict[str, str | None]) -> None:
    from agentenv.guest import files, filesystem, loop, metrics, watch
    from agentenv.guest.context import Context
    from agentenv.guest.http import Request, Response, Router
    from agentenv.guest.server import Server

    context = Context(default_user=settings["user"] or "root")
    context.token = settings["token"]
    context.default_workdir = settings["workdir"]
    router = Router()

    async def health(request: Request) -> Response:
        return Response(204)

    router.add("GET", "/health", health)
    for service in (files, filesystem, metrics, watch):
        service.register(router, context)

    async def main() -> None:
        print(Server(router).listen("127.0.0.1", 0), flush=True)
        await loop.Event().wait()

    loop.run(main())


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
