"""`python -m agentenv.interpreter`: serve until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from types import FrameType

import uvicorn

from agentenv.interpreter import kernel
from agentenv.interpreter.contexts import Contexts
from agentenv.interpreter.environment import Environment
from agentenv.interpreter.server import application

PORT = 49999
IDLE_S = 640  # an idle connection is kept for longer than by any proxy before it


class Server(uvicorn.Server):
    """uvicorn's looks ten times a second whether it is to end; an idle sandbox should idle."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called with a signal."""
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._told.set)

    async def main_loop(self) -> None:
        """Wait until told to end."""
        self._loop = asyncio.get_running_loop()
        if not self.should_exit:
            await self._told.wait()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description="Run code for E2B's code interpreter clients.")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--home", default="/home/user", help="directory of contexts that do not name one")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    contexts = Contexts(arguments.home, Environment(), kernel.installed, kernel.JupyterKernel.start)
    config = uvicorn.Config(
        application(contexts),
        host=arguments.host,
        port=arguments.port,
        timeout_keep_alive=IDLE_S,
        access_log=False,
        log_level="warning",
        date_header=False,  # it would be that of the start
    )
    server = Server(config)
    server.run()
    if not server.started:
        sys.exit(1)


if __name__ == "__main__":
    main()
