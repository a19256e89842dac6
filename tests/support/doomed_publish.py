"""A node that dies while it makes a snapshot: `doomed_publish.py HOME TARGET before|after COUNT`.

It kills itself before or after the COUNTth call of TARGET (`module:Class.function`) and prints the
snapshot's id once it would answer.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.snapshot.store import Snapshots
from support.snapshots import add


def doom(target: str, when: str, count: int) -> None:
    module, _, path = target.partition(":")
    owner: object = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    calls = 0

    def doomed(*args: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == count and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **named)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, doomed)


async def main() -> None:
    home, target, when, count = sys.argv[1:]
    database = Database(Path(home) / "aenv.db")
    store = Snapshots(database, Ledger(database), Path(home))
    doom(target, when, int(count))
    made = await add(store, durable=True, names=("mine:default",))
    print(made.id, flush=True)


asyncio.run(main())
