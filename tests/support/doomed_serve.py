"""A node that dies at one phase of one operation: `doomed_serve.py DIRECTORY serve ...`, as `aenv serve ...`.

Each phase that begins is written to DIRECTORY/phases, as a line `OPERATION PHASE`. While DIRECTORY/doom
says `OPERATION PHASE started` (or `complete`), the process kills itself there; it takes the file away
first, so that its next life goes on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentenv.cli import main
from agentenv.sandbox.phases import Phases

DIRECTORY = Path(sys.argv.pop(1))
original = Phases.__call__


def reach(phase: str) -> None:
    """Die, if this is where."""
    doom = DIRECTORY / "doom"
    if doom.exists() and doom.read_text() == phase:
        doom.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def traced(self: Phases, name: str) -> Iterator[None]:
    phase = f"{self.operation} {name}"
    with (DIRECTORY / "phases").open("a") as file:
        file.write(f"{phase}\n")
    reach(f"{phase} started")
    with original(self, name):
        yield
    reach(f"{phase} complete")


setattr(Phases, "__call__", traced)  # noqa: B010
main()
