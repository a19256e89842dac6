"""Machines that die in the midst of an operation: who hears what, what is kept, and that nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from e2b import Sandbox

from support.marked import delete_checkpoints, mark, marks, post, shown
from support.running import RunningNode
from support.wholeness import require_whole

pytestmark = pytest.mark.machine

DOOMED = Path(__file__).parents[1] / "support" / "doomed_serve.py"

Found = Literal["failed", "paused", "running"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doom")


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode], directory: Path) -> RunningNode:
    return node_factory("machines-die", program=("-P", str(DOOMED), str(directory)))


@pytest.fixture
def sandbox(node: RunningNode, host_audit: None) -> Iterator[Sandbox]:
    made = node.sandbox("base")
    mark(made)
    yield made
    made.kill()
    delete_checkpoints(node)
    require_whole(node)


@pytest.mark.parametrize(
    ("operation", "moment", "status"),
    [
        ("pause", "stop started", 500),
        ("pause", "capture started", 500),
        ("checkpoint", "stop started", 500),
        ("checkpoint", "capture started", 500),
        ("checkpoint", "run started", 500),
        ("fork", "capture started", 500),
        ("refresh", "capture started", 500),
    ],
)
def test_before_it_is_captured(
    node: RunningNode, sandbox: Sandbox, directory: Path, operation: str, moment: str, status: int
) -> None:
    """Nothing is left to go on with: the sandbox has failed, and says why."""
    (directory / "doom").write_text(f"{operation} {moment} machine")
    path = {"checkpoint": "snapshots", "refresh": "refresh-memory"}.get(operation, operation)
    answer = post(node, f"/sandboxes/{sandbox.sandbox_id}/{path}")
    assert answer.status_code == status, answer.text
    assert not (directory / "doom").exists()
    told = shown(node, sandbox)
    assert told["code"] == 404
    assert "it failed: " in told["message"] and "killed by signal 9" in told["message"], told
    assert not sandbox.is_running()
    require_whole(node)


def test_a_pause_needs_it_no_more_once_it_is_captured(
    node: RunningNode, sandbox: Sandbox, directory: Path
) -> None:
    (directory / "doom").write_text("pause publish started machine")
    assert sandbox.pause()
    require_whole(node)
    sandbox.connect(timeout=600)
    assert marks(sandbox) == ["mark", "mark"]


def test_a_checkpoint_outlives_it(node: RunningNode, sandbox: Sandbox, directory: Path) -> None:
    """It was taken, and is answered; the sandbox fails by itself."""
    (directory / "doom").write_text("checkpoint publish started machine")
    made = sandbox.create_snapshot()
    require_whole(node)
    assert "killed by signal 9" in shown(node, sandbox)["message"]
    child = node.sandbox(made.snapshot_id)
    assert marks(child) == ["mark", "mark"]
    child.kill()


@pytest.mark.parametrize("moment", ["restore complete", "run complete", "agent started"])
@pytest.mark.parametrize("operation", ["resume", "rollback"])
def test_as_it_wakes(
    node: RunningNode, sandbox: Sandbox, directory: Path, operation: str, moment: str
) -> None:
    """The sandbox is paused as before, or where it was to go, with the reason; then it wakes."""
    path = "connect"
    body: dict[str, Any] = {"timeout": 600}
    if operation == "rollback":
        path, body = "rollback", {"snapshotID": sandbox.create_snapshot().snapshot_id}
        sandbox.commands.run("echo other | tee /dev/shm/mark > /home/user/mark")
    else:
        sandbox.pause()
    (directory / "doom").write_text(f"{operation} {moment} machine")
    answer = post(node, f"/sandboxes/{sandbox.sandbox_id}/{path}", body)
    assert answer.status_code == 500, answer.text
    told = shown(node, sandbox)
    assert told["state"] == "paused"
    assert "it could not be resumed" in told["reason"]
    require_whole(node)
    sandbox.connect(timeout=600)
    assert "reason" not in shown(node, sandbox)
    assert marks(sandbox) == ["mark", "mark"]


@pytest.mark.parametrize("moment", ["restore complete", "agent started"])
def test_as_it_is_created(
    node: RunningNode, sandbox: Sandbox, directory: Path, host_audit: None, moment: str
) -> None:
    (directory / "doom").write_text(f"create {moment} machine")
    answer = post(node, "/v2/sandboxes", {"templateID": "base", "timeout": 60})
    assert answer.status_code == 500, answer.text
    with node.client() as client:
        listed = [each["sandboxID"] for each in client.get("/v2/sandboxes").json()]
    assert listed == [sandbox.sandbox_id]
    require_whole(node)
    assert marks(sandbox) == ["mark", "mark"]
