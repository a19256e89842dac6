"""Whether a real node is whole while nothing is asked of it: what is on record, and what is on the host.

No machine without a record, no record without its data, and nothing that belongs to neither.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import audit
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.sandbox.records import Records, Sandbox
from agentenv.sandbox.transitions import State
from agentenv.snapshot.store import Snapshots
from support.running import RunningNode

# What is done after an answer (a process that ends, a directory that goes) is done by then.
SETTLE_LIMIT_S = 20.0

OWN = ("pause", "fork")


@dataclass(frozen=True)
class Recorded:
    """A resource of the ledger."""

    owner: str
    kind: str
    name: str
    detail: dict[str, Any]


def require_whole(node: RunningNode) -> None:
    """Fail with what is wrong, once nothing is under way any more."""
    deadline = time.monotonic() + SETTLE_LIMIT_S
    pause = 0.02
    while problems := problems_of(node):
        assert time.monotonic() < deadline, "the node is not whole:\n" + "\n".join(problems)
        time.sleep(pause)
        pause = min(pause * 2, 0.5)


def problems_of(node: RunningNode) -> list[str]:
    """What is wrong now, a line each."""
    host = audit.snapshot(audit.Scope((node.home,), (str(node.runtime),)))
    with closing(Database(node.home / "aenv.db")) as database:
        sandboxes = Records(database).unended()
        snapshots = Snapshots(database, Ledger(database), node.home)
        return [
            *_unsettled(sandboxes),
            *_of_resources(sandboxes, resources(node), host),
            *_of_snapshots(sandboxes, snapshots),
        ]


def resources(node: RunningNode) -> list[Recorded]:
    """The ledger, without what is the node's own."""
    with closing(sqlite3.connect(node.home / "aenv.db")) as database:
        rows = database.execute("SELECT owner, kind, name, detail FROM resources WHERE owner <> 'node'")
        return [Recorded(owner, kind, name, json.loads(detail)) for owner, kind, name, detail in rows]


def machine_pid(node: RunningNode, sandbox_id: str) -> int | None:
    """The process of a sandbox's machine, if it has one; for sandboxes that no pool gave a machine."""
    pids = [
        each.detail["pid"] for each in resources(node) if each.kind == "process" and each.owner == sandbox_id
    ]
    return pids[0] if pids else None


def _unsettled(sandboxes: Iterable[Sandbox]) -> Iterator[str]:
    for each in sandboxes:
        if each.state not in (State.RUNNING, State.PAUSED):
            yield f"sandbox {each.id} is {each.state}"


def _of_resources(sandboxes: list[Sandbox], ledger: list[Recorded], host: audit.Things) -> Iterator[str]:
    running = [each for each in sandboxes if each.state is State.RUNNING]
    machines = {each.machine.id for each in running if each.machine is not None}
    slots = {each.id for each in running}
    yield from _same(
        "machines of running sandboxes", machines, "processes on record", _owners(ledger, "process")
    )
    yield from _same("running sandboxes", slots, "slots on record", _owners(ledger, "slot"))
    yield from _same("machines", machines, "owners of directories", set(_owners(ledger, "directory")))
    yield from (
        f"{each.kind} {each.name} of {each.owner} is left" for each in ledger if each.kind == "snapshot"
    )
    pids = [str(each.detail.get("pid")) for each in ledger if each.kind == "process"]
    names = [each.name for each in ledger if each.kind == "slot"]
    groups = [path for each in ledger if each.kind == "cgroup" for path in each.detail["paths"]]
    directories = [each.name for each in ledger if each.kind == "directory"]
    found = [path for path, what in host["file"].items() if what == "a machine's directory"]
    yield from _same("processes on record", pids, "on the host", host["process"])
    yield from _same("slots on record", names, "namespaces", host["namespace"])
    yield from _same("slots on record", names, "links", host["link"])
    yield from _same("control groups on record", groups, "on the host", host["cgroup"])
    yield from _same("directories on record", directories, "on the host", found)


def _of_snapshots(sandboxes: list[Sandbox], snapshots: Snapshots) -> Iterator[str]:
    paused = {each.snapshot for each in sandboxes if each.state is State.PAUSED}
    for each in snapshots.of_kinds(OWN):
        if each.id not in paused:
            yield f"snapshot {each.id} ({each.kind} of {each.sandbox_id}) is nobody's"
    kept = {each.id for each in snapshots.of_kinds(("pause", "checkpoint", "template"))}
    for name in paused - kept:
        record = None if name is None else snapshots.recorded(name)
        if record is None:
            yield f"what a sandbox was paused into is gone: {name}"
        else:
            snapshots.require_files(record)
    yield from (f"{each.path} {each.what}" for each in snapshots.check())


def _owners(ledger: list[Recorded], kind: str) -> list[str]:
    return [each.owner for each in ledger if each.kind == kind]


def _same(what: str, these: Iterable[str], which: str, those: Iterable[str]) -> Iterator[str]:
    one, other = Counter(list(these)), Counter(list(those))
    if one != other:
        more, less = sorted((one - other).elements()), sorted((other - one).elements())
        yield f"{what} are not {which}: only the former are {more}, only the latter {less}"
