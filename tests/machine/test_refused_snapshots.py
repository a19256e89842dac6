"""Snapshots that cannot be used and guests that do not answer: a typed error each, and nothing lost."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from e2b import Sandbox

from support.marked import mark, marks, post, shown
from support.running import RunningNode
from support.wholeness import require_whole, resources

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    return node_factory("refused")


@pytest.fixture(scope="module")
def asleep(node: RunningNode) -> Iterator[Sandbox]:
    """A paused sandbox that all tests of this module share."""
    made = node.sandbox("base")
    mark(made)
    made.pause()
    yield made
    made.kill()
    require_whole(node)


@pytest.fixture
def paused(asleep: Sandbox) -> Sandbox:
    asleep.pause()
    return asleep


def shorter(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)


def spoilt(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(b"\xa5" * 64)


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (shorter, ("state", "memory", "disk")),
        (Path.unlink, ("state", "memory", "memory.map", "disk")),
        (spoilt, ("state", "memory.map", "disk")),
    ],
    ids=["cut-short", "missing", "spoilt"],
)
def test_a_damaged_file(
    node: RunningNode, paused: Sandbox, damage: Callable[[Path], None], names: tuple[str, ...]
) -> None:
    """It is told which, the sandbox stays paused with the reason, and wakes when the file is whole."""
    directory = node.home / "snapshots" / shown(node, paused)["snapshotID"]
    for name in names:
        content = (directory / name).read_bytes()
        damage(directory / name)
        answer = post(node, f"/sandboxes/{paused.sandbox_id}/connect", {"timeout": 600})
        (directory / name).write_bytes(content)
        assert answer.status_code == 500, f"{name}: {answer.text}"
        assert name in answer.json()["message"] or "layer" in answer.json()["message"], answer.text
        told = shown(node, paused)
        assert (told["state"], told["reason"].startswith("it could not be resumed")) == ("paused", True)
        require_whole(node)
    paused.connect(timeout=600)
    assert "reason" not in shown(node, paused)
    assert marks(paused) == ["mark", "mark"]


@pytest.mark.parametrize("key", ["version", "cpu", "kernel"])
def test_one_of_another_host(node: RunningNode, paused: Sandbox, key: str) -> None:
    """A resume is refused, with what differs; a boot from the disk is not."""
    with altered(node, shown(node, paused)["snapshotID"], key):
        answer = post(node, f"/sandboxes/{paused.sandbox_id}/connect", {"timeout": 600})
        assert answer.status_code == 409, answer.text
        assert key in answer.json()["message"]
        assert shown(node, paused)["state"] == "paused"
        require_whole(node)
    if key == "version":
        paused.connect(timeout=600)
        assert marks(paused) == ["mark", "mark"]


@contextmanager
def altered(node: RunningNode, snapshot: str, key: str) -> Iterator[None]:
    """As if a snapshot had been taken elsewhere."""
    with closing(sqlite3.connect(node.home / "aenv.db", timeout=10, isolation_level=None)) as database:
        query = "SELECT document FROM snapshots WHERE id = ?"
        document = database.execute(query, (snapshot,)).fetchone()[0]
        other = json.loads(document)
        assert key in other["fingerprint"]
        other["fingerprint"][key] = "another"
        update = "UPDATE snapshots SET document = ? WHERE id = ?"
        database.execute(update, (json.dumps(other), snapshot))
        try:
            yield
        finally:
            database.execute(update, (document, snapshot))


@contextmanager
def unreachable(node: RunningNode, sandbox: Sandbox) -> Iterator[None]:
    """Have all that is sent to a guest's agent vanish in the sandbox's namespace."""
    [name] = [
        each.name for each in resources(node) if each.kind == "slot" and each.owner == sandbox.sandbox_id
    ]
    inside = ["nsenter", f"--net=/run/netns/{name}", "nft"]
    rules = """
        table inet test {
            chain agent {
                type filter hook forward priority -500
                tcp dport 49983 drop
            }
        }
    """
    subprocess.run([*inside, "-f", "-"], input=rules, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run([*inside, "delete table inet test"], check=True)


def test_an_agent_that_does_not_answer(node: RunningNode, paused: Sandbox) -> None:
    """What depends on it is refused by E2B's code for that, and the sandbox runs on; a pause that does not
    is done all the same."""
    paused.connect(timeout=600)
    path = f"/sandboxes/{paused.sandbox_id}/pause"
    with unreachable(node, paused):
        answer = post(node, path, {"requireHealthyGuest": True})
        assert answer.status_code == 503, answer.text
        assert answer.json()["error_code"] == "sandbox_snapshot_guest_agent_unresponsive"
        assert shown(node, paused)["state"] == "running"
    assert marks(paused) == ["mark", "mark"]
    assert post(node, path, {"requireHealthyGuest": True}).status_code == 204
    paused.connect(timeout=600)
    with unreachable(node, paused):
        assert post(node, path).status_code == 204
    paused.connect(timeout=600)
    assert marks(paused) == ["mark", "mark"]
