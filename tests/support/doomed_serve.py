"""A node that dies at one phase of one operation: `doomed_serve.py DIRECTORY serve ...`, as `aenv serve ...`.

Each phase that begins is written to DIRECTORY/phases, as a line `OPERATION PHASE`. While DIRECTORY/doom
says `OPERATION PHASE started` (or `complete`), the process kills itself there; it takes the file away
first, so that its next life goes on. With ` machine` after that it kills the sandbox's machine instead.
"""

from __future__ import annotations

import os
import select
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from agentenv.cli import main
from agentenv.sandbox.phases import Phases

DIRECTORY = Path(sys.argv.pop(1))
original = Phases.__call__


def reach(phases: Phases, moment: str) -> None:
    """Die, or kill the machine, if this is where."""
    doom = DIRECTORY / "doom"
    if doom.exists() and (said := doom.read_text()).startswith(moment):
        doom.unlink()
        if said == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        kill_machine(phases.sandbox_id)


def kill_machine(owner: str) -> None:
    """And return when it is gone, as far as the kernel's word goes."""
    with closing(sqlite3.connect(Path(os.environ["AENV_HOME"]) / "aenv.db")) as database:
        query = "SELECT detail ->> '$.pid' FROM resources WHERE kind = 'process' AND owner = ?"
        pid = int(database.execute(query, (owner,)).fetchone()[0])
    gone = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([gone], [], [], 30)
    os.close(gone)


@contextmanager
def traced(self: Phases, name: str) -> Iterator[None]:
    phase = f"{self.operation} {name}"
    with (DIRECTORY / "phases").open("a") as file:
        file.write(f"{phase}\n")
    reach(self, f"{phase} started")
    with original(self, name):
        yield
    reach(self, f"{phase} complete")


setattr(Phases, "__call__", traced)  # noqa: B010
main()
