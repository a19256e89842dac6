"""A real sandbox that is paused and captured again and again: its chains stay short, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox

from support.running import RunningNode

pytestmark = pytest.mark.machine

SOAK = bool(os.environ.get("AENV_TEST_SOAK"))
CYCLES = 40 if SOAK else 13
LAYERS = 16 if SOAK else 4
EVERY = 10 if SOAK else 4  # as often there is a checkpoint
BELOW = 2  # the image and the template's layer

COUNTING = "n=0; while sleep 0.05; do n=$((n+1)); echo $n > /dev/shm/count; done"


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    return node_factory("chains", fold_layers=str(LAYERS))


def records(node: RunningNode) -> dict[str, dict[str, Any]]:
    """All snapshots on record, by id."""
    database = sqlite3.connect(f"file:{node.home}/aenv.db?mode=ro", uri=True)
    try:
        rows = database.execute("SELECT id, document FROM snapshots WHERE deleted_at IS NULL")
        return {name: json.loads(document) for name, document in rows}
    finally:
        database.close()


def settled(record: dict[str, Any]) -> bool:
    """Whether nothing is to be done for a snapshot any more."""
    memory = record["memory"]
    own = [*record["disk"], memory["base"], *memory["deltas"], record["state"]]
    return (
        len(record["disk"]) <= BELOW + LAYERS
        and len(memory["deltas"]) <= LAYERS
        and all(file["digest"] for file in own if f"/{record['id']}/" in file["path"])
    )


@pytest.mark.timeout(600)
def test_forty_times(node: RunningNode, host_audit: None) -> None:
    access = {"api_url": node.url, "sandbox_url": node.url, "api_key": node.key, "request_timeout": 120}
    sandbox = node.sandbox("base")
    sandbox.commands.run(COUNTING, background=True)
    checkpoints = {}
    for number in range(CYCLES):
        sandbox.commands.run(f"echo {number} > ~/{number}; echo {number} > /dev/shm/{number}; rm -f ~/gone*")
        sandbox.files.write(f"/home/user/gone{number}", os.urandom(200_000))
        if number % EVERY == EVERY - 1:
            checkpoints[number] = sandbox.create_snapshot().snapshot_id
        sandbox.pause()
        if number == CYCLES // 2:  # and it is known after a restart, too, what it stands on
            node.kill()
            node.start()
        sandbox.connect(timeout=600)
    sandbox.pause()
    deadline = time.monotonic() + 120
    while not all(map(settled, found := records(node).values())) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert all(map(settled, found)), [each for each in found if not settled(each)]
    assert any("-" in Path(layer["path"]).name for each in found for layer in each["disk"])
    _check_disks(node, found)
    sandbox.connect(timeout=600)
    expected = [str(number) for number in range(CYCLES)]
    names = "$(seq 0 {last})"
    look = "cd {place}; for n in " + names + "; do cat $n; done"
    assert _said(sandbox, look.format(place="~", last=CYCLES - 1)) == expected
    assert _said(sandbox, look.format(place="/dev/shm", last=CYCLES - 1)) == expected
    assert _said(sandbox, "ls ~ | grep gone") == [f"gone{CYCLES - 1}"]
    assert int(_said(sandbox, "a=$(cat /dev/shm/count); sleep 1; echo $(($(cat /dev/shm/count) - a))")[0]) > 0
    for number, snapshot in checkpoints.items():
        child = Sandbox.create(snapshot, timeout=300, **access)  # type: ignore[arg-type]
        assert _said(child, look.format(place="/dev/shm", last=number)) == expected[: number + 1]
        assert _said(child, "ls ~ | grep gone") == [f"gone{number}"]
        child.kill()
        assert Sandbox.delete_snapshot(snapshot, **access)  # type: ignore[arg-type]
    sandbox.kill()


def _said(sandbox: Sandbox, command: str) -> list[str]:
    return list(sandbox.commands.run(command).stdout.split())


def _check_disks(node: RunningNode, found: Any) -> None:
    """QEMU's own tool finds nothing wrong with any layer."""
    tool = shutil.which("qemu-img")
    assert tool is not None, "qemu-img is one of the packages that the tests need"
    layers = {layer["path"] for each in found for layer in each["disk"] if layer["format"] == "qcow2"}
    for path in layers:
        done = subprocess.run(
            [tool, "check", "--output=json", node.home / path], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
