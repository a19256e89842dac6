"""`python -m agentenv.interpreter`: serve until told to stop."""

from __future__ import annotations

import argparse
import logging

import uvicorn

from agentenv.interpreter import kernel
from agentenv.interpreter.contexts import Contexts
from agentenv.interpreter.environment import Environment
from agentenv.interpreter.server import application

PORT = 49999
IDLE_S = 640  # an idle connection is kept for longer than by any proxy before it


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description="Run code for E2B's code interpreter clients.")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--home", default="/home/user", help="directory of contexts that do not name one")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    contexts = Contexts(arguments.home, Environment(), kernel.installed, kernel.JupyterKernel.start)
    uvicorn.run(
        application(contexts),
        host=arguments.host,
        port=arguments.port,
        timeout_keep_alive=IDLE_S,
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
