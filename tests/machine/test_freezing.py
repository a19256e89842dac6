"""Captures of the disk alone: of a filesystem at rest, which is there again for the one that runs on."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from support.running import RunningNode

pytestmark = pytest.mark.machine

WRITING = "n=0; while :; do n=$((n+1)); echo $n > ~/count; cp -r /etc/. ~/copy; done 2>/dev/null"


@pytest.fixture
def sandbox(node: RunningNode, host_audit: None) -> Iterator[Sandbox]:
    sandbox = node.sandbox("base")
    yield sandbox
    with node.client() as client:
        for each in client.get("/snapshots").json():
            client.delete(f"/templates/{each['snapshotID']}")
    sandbox.kill()


def at_rest(node: RunningNode, snapshot: str, place: Path) -> None:
    """The disk of a snapshot needs nothing to be mended: neither its journal nor anything else."""
    database = sqlite3.connect(f"file:{node.home}/aenv.db?mode=ro", uri=True)
    try:
        (document,) = database.execute("SELECT document FROM snapshots WHERE id = ?", [snapshot]).fetchone()
    finally:
        database.close()
    record, disk = json.loads(document), None
    assert (record["memory"], record["state"]) == (None, None)
    for layer in record["disk"]:
        file = {"driver": "file", "filename": str(node.home / layer["path"]), "locking": "off"}
        upon = {} if layer["format"] == "raw" else {"backing": disk}
        disk = {"driver": layer["format"], "file": file, "read-only": True, **upon}
    flat = place / "flat"
    subprocess.run(["qemu-img", "convert", "-O", "raw", f"json:{json.dumps(disk)}", flat], check=True)
    told = subprocess.run(["dumpe2fs", "-h", flat], check=True, capture_output=True, text=True).stdout
    assert "needs_recovery" not in told
    subprocess.run(["e2fsck", "-f", "-n", flat], check=True, capture_output=True)
    flat.unlink()


def count(sandbox: Sandbox) -> int:
    return int(sandbox.commands.run("cat ~/count").stdout or 0)


def test_the_filesystem_rests_and_goes_on(node: RunningNode, sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.commands.run(WRITING, background=True)
    sandbox.commands.run("until [ -s ~/count ]; do sleep 0.05; done")
    path = f"/sandboxes/{sandbox.sandbox_id}"
    with node.client() as client:
        sandbox.files.write("/home/user/file", "data")
        taken = client.post(f"{path}/snapshots", json={"memory": False})
        assert taken.status_code == 201, taken.text
        assert "thaw" in taken.headers["server-timing"]
        sandbox.files.write("/home/user/file", "more")  # which the agent itself writes, at once
        before = count(sandbox)
        sandbox.commands.run(f"until [ $(cat ~/count || echo 0) -gt {before} ]; do sleep 0.05; done")
        at_rest(node, taken.json()["snapshotID"], tmp_path)
        sandbox.pause(mode="filesystem")
        at_rest(node, client.get(path).json()["snapshotID"], tmp_path)
    sandbox.connect(timeout=600)
    assert sandbox.files.read("/home/user/file") == "more"
    sandbox.commands.run("echo written > ~/again")


def test_a_pause_right_after_finds_it_thawed(node: RunningNode, sandbox: Sandbox) -> None:
    """Memory that were captured with a frozen filesystem would wake with one."""
    with node.client() as client:
        taken = client.post(f"/sandboxes/{sandbox.sandbox_id}/snapshots", json={"memory": False})
        paused = client.post(f"/sandboxes/{sandbox.sandbox_id}/pause")
        assert (taken.status_code, paused.status_code) == (201, 204)
    sandbox.connect(timeout=600)
    sandbox.commands.run("echo data > ~/file", timeout=5)
    assert sandbox.files.read("/home/user/file") == "data\n"


def test_one_whose_agent_hangs_is_paused_at_its_end(node: RunningNode, sandbox: Sandbox) -> None:
    path = f"/sandboxes/{sandbox.sandbox_id}"
    sandbox.commands.run("(sleep 0.5; ip link set eth0 down) >/dev/null 2>&1 &", user="root")
    time.sleep(1)  # from then on nobody can ask the guest whether it has happened
    with node.client() as client:
        assert client.post(f"{path}/timeout", json={"timeout": 1}).status_code == 204
        deadline = time.monotonic() + 60
        while "pauseMode" not in (shown := client.get(path).json()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (shown["state"], shown.get("envdUnresponsiveAtPause")) == ("paused", True)
