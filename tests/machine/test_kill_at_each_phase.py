"""A node that is killed at each phase of each operation, and what its next life makes of it.

Whatever was answered is whole, whatever was not is gone or as before, what ran is adopted, and nothing
is left over.
"""

from __future__ import annotations

import ast
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from e2b import Sandbox

import agentenv.sandbox
from support.running import RunningNode
from support.wholeness import machine_pid, require_whole

pytestmark = pytest.mark.machine

DOOMED = Path(__file__).parents[1] / "support" / "doomed_serve.py"

# Deaths at the end of phases that another one follows as well, and all that takes long.
SOAK = bool(os.environ.get("AENV_TEST_SOAK"))

Found = Literal["running", "paused", "gone"]
Moment = Literal["started", "complete"]


@dataclass(frozen=True)
class Way:
    """A call and the phases that it goes through, as `Phases` names them; `of` is a sandbox's id in it.

    Args:
        name: of the way in the tests' names.
        operation: whose phases.
        phases: in their order, those where the node is to die.
        path: of the call.
        body: of the call. `CHECKPOINT` and `DISK` in it are replaced by the ids of such snapshots.
        before: how the sandbox is when it is asked: `disk` is paused without its memory.
        found: how it is after a death at the start of any of the phases.
        last: how it is after a death at the end of the last phase; None where that is another way's.
        method: of the call.
        soak: phases for the soak alone, as their code is another way's.
    """

    name: str
    operation: str
    phases: tuple[str, ...]
    path: str
    body: dict[str, Any] = field(default_factory=dict)
    before: Literal["any", "running", "paused", "disk"] = "running"
    found: Found = "running"
    last: Found | None = None
    method: str = "POST"
    soak: tuple[str, ...] = ()

    @property
    def creates(self) -> bool:
        """Whether it is about another sandbox than the one that there is."""
        return self.before == "any"


CAPTURE = ("stop", "capture", "run", "publish")
RESTORE = ("restore", "run", "agent")
NEW = "/v2/sandboxes"
BASE = {"templateID": "base", "timeout": 600}
CONNECT = {"timeout": 600}

WAYS = (
    Way("prepare", "create", ("prepare",), NEW, BASE, before="any", found="gone"),
    Way("prepare", "prepare", ("boot", "agent", "stop", "capture", "publish"), NEW, BASE,
        before="any", found="gone", last="gone", soak=("boot", "stop", "capture")),
    Way("create", "create", ("slot", *RESTORE), NEW, BASE, before="any", found="gone", last="gone"),
    Way("create-from-a-disk", "create", ("boot",), NEW, {**BASE, "templateID": "DISK"},
        before="any", found="gone"),
    Way("checkpoint", "checkpoint", CAPTURE, "/sandboxes/of/snapshots", last="running"),
    Way("checkpoint-of-the-disk", "checkpoint", ("agent", "thaw"), "/sandboxes/of/snapshots",
        {"memory": False}),
    Way("fork", "fork", CAPTURE, "/sandboxes/of/fork", {"count": 2}, last="running",
        soak=("stop", "capture", "run")),
    Way("fork-its-children", "create", ("restore", "agent"), "/sandboxes/of/fork", {"count": 2},
        last="running"),
    Way("pause", "pause", ("stop", "capture", "publish"), "/sandboxes/of/pause", last="paused"),
    Way("pause-to-disk", "pause", ("agent",), "/sandboxes/of/pause", {"memory": False}),
    Way("resume", "resume", ("slot", *RESTORE), "/sandboxes/of/connect", CONNECT,
        before="paused", found="paused", last="paused"),
    Way("resume-from-a-disk", "resume", ("boot",), "/sandboxes/of/connect", CONNECT,
        before="disk", found="paused"),
    Way("rollback", "rollback", ("end", *RESTORE), "/sandboxes/of/rollback", {"snapshotID": "CHECKPOINT"},
        found="paused", last="paused"),
    Way("rollback-of-a-paused-one", "rollback", ("slot",), "/sandboxes/of/rollback",
        {"snapshotID": "CHECKPOINT"}, before="paused", found="paused"),
    Way("rollback-to-a-disk", "rollback", ("boot",), "/sandboxes/of/rollback", {"snapshotID": "DISK"},
        found="paused"),
    Way("refresh", "refresh", ("stop", "capture", "publish"), "/sandboxes/of/refresh-memory",
        soak=("stop", "capture")),
    Way("refresh-as-it-starts-anew", "refresh", ("end", *RESTORE), "/sandboxes/of/refresh-memory",
        found="paused", last="paused"),
    Way("kill", "kill", ("release",), "/sandboxes/of", found="gone", last="gone", method="DELETE"),
)  # fmt: skip

# What a start command and systemd take lies between two phases of a preparation: `agent` and `stop`.
# Rules and limits, where they are asked for, are put into a slot beside `restore`, or before `run`.
ELSEWHERE = {"start", "systemd", "rules", "limits"}

TABLE = frozenset((way.operation, phase) for way in WAYS for phase in way.phases)


def cases() -> Iterator[Any]:
    """Each way, the phase and moment of a death, and how the sandbox is found."""
    for way in WAYS:
        for phase in way.phases:
            if phase in way.soak and not SOAK:
                continue
            yield pytest.param(way, phase, "started", way.found, id=f"{way.name}-{phase}")
            ends = way.last if phase == way.phases[-1] else way.found if SOAK else None
            if ends is not None:
                yield pytest.param(way, phase, "complete", ends, id=f"{way.name}-{phase}-complete")


class World:
    """A node that can be told to die, and the sandbox that it has."""

    def __init__(self, node: RunningNode, directory: Path) -> None:
        self.node = node
        self._directory = directory
        self._numbers = count(1)
        self.sandbox: Sandbox | None = None
        self.mark = 0

    @property
    def of(self) -> str:
        assert self.sandbox is not None
        return str(self.sandbox.sandbox_id)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        with self.node.client() as client:
            return client.request(method, path, json=body)

    def done(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self.call(method, path, body)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def die(self, way: Way, phase: str, moment: Moment, body: dict[str, Any]) -> None:
        """Have the node die in the midst of a call, and start it again."""
        (self._directory / "doom").write_text(f"{way.operation} {phase} {moment}")
        path = way.path.replace("/of", f"/{self.of}") if "/of" in way.path else way.path
        with pytest.raises(httpx.TransportError):
            answer = self.call(way.method, path, body or None)
            (self._directory / "doom").unlink()
            pytest.fail(f"it has no such phase: {answer.status_code} {answer.text}")
        assert self.node.died() == -signal.SIGKILL
        self.node.start()

    def phases(self) -> set[tuple[str, str]]:
        """All that any operation went through so far."""
        lines = (self._directory / "phases").read_text().splitlines()
        return {(operation, phase) for operation, phase in map(str.split, lines)}

    # The sandbox

    def prepare(self, before: str) -> None:
        """Have a sandbox in that state, with new marks."""
        if self.sandbox is None:
            self.sandbox = self.node.sandbox("base")
        elif self.state() == "paused":
            self.sandbox.connect(timeout=600)
        self.remember()
        if before in ("paused", "disk"):
            self.done("POST", f"/sandboxes/{self.of}/pause", {"memory": before == "paused"})

    def state(self) -> str:
        answer = self.call("GET", f"/sandboxes/{self.of}")
        return "gone" if answer.status_code == 404 else str(answer.json()["state"])

    def remember(self) -> int:
        """Leave a mark in the memory and on the disk; a process goes on beside."""
        self.mark = next(self._numbers)
        assert self.sandbox is not None
        self.sandbox.commands.run(
            f"echo {self.mark} | tee /home/user/mark > /dev/shm/mark;"
            " pgrep -x sleep > /dev/null || (sleep 100000 > /dev/null 2>&1 &)"
        )
        return self.mark

    def marks(self) -> list[str]:
        """What the disk and the memory say, and how many such processes there are. The very client from
        before is used: same id, address and token."""
        assert self.sandbox is not None
        command = "cat /home/user/mark; cat /dev/shm/mark || echo none; pgrep -c -x sleep || true"
        return list(self.sandbox.commands.run(command).stdout.split())

    def snapshot(self, *, memory: bool = True) -> str:
        made = self.done("POST", f"/sandboxes/{self.of}/snapshots", {"memory": memory})
        return str(made["snapshotID"])

    def snapshots(self) -> set[str]:
        return {each["snapshotID"] for each in self.done("GET", "/snapshots")}

    def forget_snapshots(self) -> None:
        for each in self.snapshots():
            self.done("DELETE", f"/templates/{each}")


@pytest.fixture(scope="module")
def world(node_factory: Callable[..., RunningNode], tmp_path_factory: pytest.TempPathFactory) -> World:
    directory = tmp_path_factory.mktemp("doom")
    return World(node_factory("killed", program=("-P", str(DOOMED), str(directory))), directory)


@pytest.fixture(scope="module", autouse=True)
def emptied(world: World) -> Iterator[None]:
    """In the end nothing at all is left of the sandboxes."""
    yield
    for each in world.done("GET", "/v2/sandboxes"):
        world.done("DELETE", f"/sandboxes/{each['sandboxID']}")
    world.forget_snapshots()
    require_whole(world.node)


def templates_first(node: RunningNode) -> list[str]:
    """The first snapshots of templates that are on record."""
    with closing(sqlite3.connect(node.home / "aenv.db")) as database:
        query = "SELECT id FROM snapshots WHERE kind = 'template' AND deleted_at IS NULL"
        return [row[0] for row in database.execute(query)]


def spoil_first(node: RunningNode) -> None:
    """Make the template's first snapshot useless, so that it is made anew."""
    for name in templates_first(node):
        (node.home / "snapshots" / name / "state").unlink(missing_ok=True)


@pytest.mark.parametrize(("way", "phase", "moment", "found"), list(cases()))
def test_death(world: World, way: Way, phase: str, moment: Moment, found: Found) -> None:
    body, back = arranged(world, way)
    snapshots, pid = world.snapshots(), machine_pid(world.node, world.of)

    world.die(way, phase, moment, body)

    require_whole(world.node)
    complete = (phase, moment) == ("publish", "complete")
    if way.operation == "prepare":
        assert len(templates_first(world.node)) == complete
    assert len(world.snapshots() - snapshots) == (complete and way.operation == "checkpoint")
    if way.creates:
        found = "running"
    assert world.state() == found
    listed = {each["sandboxID"] for each in world.done("GET", "/v2/sandboxes")}
    assert listed == ({world.of} if found != "gone" else set())
    if found == "gone":
        world.sandbox = None
    elif found == "paused":
        check_it_wakes(world, way, f"{back if way.operation == 'rollback' else world.mark}")
    else:
        assert machine_pid(world.node, world.of) == pid
        assert world.marks() == [f"{world.mark}", f"{world.mark}", "1"]
        if not way.creates and (SOAK or complete or phase in ("run", "publish")):
            check_it_goes_on(world)  # where a layer had been sealed already
    world.forget_snapshots()
    assert world.phases() <= TABLE, "a phase that no way here goes through"


def arranged(world: World, way: Way) -> tuple[dict[str, Any], int]:
    """Have all that a call needs; returns its body, and the mark of the snapshot in it."""
    world.prepare("running")
    back, body = world.mark, dict(way.body)
    for key, value in body.items():
        if value in ("CHECKPOINT", "DISK"):
            body[key] = world.snapshot(memory=value == "CHECKPOINT")
    if not way.creates:
        world.prepare(way.before)
    elif way.name == "prepare":
        spoil_first(world.node)
    return body, back


def check_it_wakes(world: World, way: Way, mark: str) -> None:
    """A sandbox that was paused before, or is paused now, has all that it had."""
    assert world.sandbox is not None
    assert machine_pid(world.node, world.of) is None
    disk_alone = way.before == "disk" or way.name == "rollback-to-a-disk"
    if disk_alone and not SOAK:  # a boot takes long, and is as any other
        world.sandbox.kill()
        world.sandbox = None
        return
    world.sandbox.connect(timeout=600)
    assert world.marks() == ([mark, "none", "0"] if disk_alone else [mark, mark, "1"])


def check_it_goes_on(world: World) -> None:
    """A sandbox whose capture was cut off is captured as if nothing had been."""
    mark = world.mark
    made = world.snapshot()
    world.remember()
    world.done("POST", f"/sandboxes/{world.of}/rollback", {"snapshotID": made})
    assert world.marks() == [f"{mark}", f"{mark}", "1"]
    world.mark = mark


def test_the_table_has_all_phases_and_operations() -> None:
    """Those that the source names. What a variable names, the deaths themselves find."""
    named: set[str] = set()
    operations: set[str] = set()
    for file in Path(agentenv.sandbox.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                into = {"phases": named, "Phases": operations}.get(node.func.id)
                if into is not None and isinstance(node.args[0], ast.Constant):
                    into.add(str(node.args[0].value))
    assert named - ELSEWHERE == {phase for _, phase in TABLE}
    assert operations <= {operation for operation, _ in TABLE}
