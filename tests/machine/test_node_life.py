"""Lives and deaths of a real node and its machines: adoption, reaping, and who hears of what."""

from __future__ import annotations

import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from e2b import Sandbox

import audit
from support.running import RunningNode

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    """A node of this module's own: it is killed again and again."""
    return node_factory("life", timeout_v1_s="60")


@pytest.fixture(autouse=True)
def clean(node: RunningNode, host_audit: None) -> Iterator[None]:
    """Each test leaves the host as it was; the sandboxes of the module's node end with the test."""
    yield
    with node.client() as client:
        for each in client.get("/v2/sandboxes").json():
            client.delete(f"/sandboxes/{each['sandboxID']}")


def create(node: RunningNode, **body: Any) -> dict[str, Any]:
    with node.client() as client:
        answer = client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 600, **body})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def connect(node: RunningNode, sandbox_id: str) -> Sandbox:
    return Sandbox.connect(
        sandbox_id, timeout=600, api_url=node.url, sandbox_url=node.url, api_key=node.key, request_timeout=60
    )


def fetch(node: RunningNode, sandbox_id: str) -> httpx.Response:
    with node.client() as client:
        return client.get(f"/sandboxes/{sandbox_id}")


def machine_pid(node: RunningNode, sandbox_id: str) -> int:
    """The process of a sandbox's machine, as the node has recorded it."""
    database = sqlite3.connect(node.home / "aenv.db")
    try:
        rows = database.execute(
            "SELECT detail FROM resources WHERE owner = ? AND kind = 'process'", (sandbox_id,)
        )
        return int(json.loads(rows.fetchone()[0])["pid"])
    finally:
        database.close()


def state_of(node: RunningNode, sandbox_id: str) -> str:
    database = sqlite3.connect(node.home / "aenv.db")
    try:
        return str(database.execute("SELECT state FROM sandboxes WHERE id = ?", (sandbox_id,)).fetchone()[0])
    finally:
        database.close()


@pytest.mark.parametrize("end", [RunningNode.stop, RunningNode.kill], ids=["SIGTERM", "SIGKILL"])
def test_a_running_sandbox_outlives_its_node(node: RunningNode, end: Callable[[RunningNode], None]) -> None:
    made = create(node, metadata={"k": "v"}, envVars={"WHO": "me"})
    sandbox = connect(node, made["sandboxID"])
    sandbox.commands.run("echo before > /tmp/note; sleep 1000 &")
    pid = machine_pid(node, made["sandboxID"])
    end(node)
    os.kill(pid, 0)
    node.start()
    body = fetch(node, made["sandboxID"]).json()
    assert (body["state"], body["metadata"], body["envdAccessToken"]) == (
        "running",
        {"k": "v"},
        made["envdAccessToken"],
    )
    # the very object from before goes on: same id, token and address
    result = sandbox.commands.run("cat /tmp/note; echo $WHO; pgrep -c sleep")
    assert result.stdout.split() == ["before", "me", "1"]
    assert machine_pid(node, made["sandboxID"]) == pid


def test_a_creation_cut_off_by_the_nodes_death_leaves_nothing(node: RunningNode) -> None:
    def give_up() -> None:
        with pytest.raises(httpx.HTTPError):
            create(node)

    begun = threading.Thread(target=give_up)
    begun.start()
    with node.client() as client:
        while not (creating := _creating(node)):
            assert client.get("/health").status_code == 204
    node.kill()
    begun.join()
    node.start()
    assert _creating(node) == []
    assert state_of(node, creating[0]) == "failed"
    assert "the node ended while the sandbox was created" in fetch(node, creating[0]).json()["message"]


def _creating(node: RunningNode) -> list[str]:
    """Sandboxes under creation whose machine's process is on record."""
    database = sqlite3.connect(node.home / "aenv.db")
    try:
        rows = database.execute(
            "SELECT s.id FROM sandboxes s JOIN resources r ON r.owner = s.id AND r.kind = 'process'"
            " WHERE s.state = 'creating'"
        )
        return [row[0] for row in rows]
    finally:
        database.close()


def test_a_machine_that_is_killed_fails_its_sandbox_and_nobody_hangs(node: RunningNode) -> None:
    made = create(node)
    sandbox = connect(node, made["sandboxID"])
    command = sandbox.commands.run("sleep 1000", background=True)
    os.kill(machine_pid(node, made["sandboxID"]), signal.SIGKILL)
    with pytest.raises(Exception, match="killed or reached its end of life"):
        command.wait()
    gone = fetch(node, made["sandboxID"])
    assert gone.status_code == 404
    assert "it failed: " in gone.json()["message"]
    assert not sandbox.is_running()
    with node.client() as client:
        assert client.delete(f"/sandboxes/{made['sandboxID']}").status_code == 404


def test_a_guest_that_shuts_itself_down_is_told_apart(node: RunningNode) -> None:
    made = create(node)
    sandbox = connect(node, made["sandboxID"])
    with pytest.raises(Exception, match="killed or reached its end of life"):
        sandbox.commands.run("sudo sh -c 'echo o > /proc/sysrq-trigger'; sleep 1000", timeout=60)
    message = fetch(node, made["sandboxID"]).json()["message"]
    assert "the guest shut itself down" in message, message


def test_a_machine_that_dies_while_nobody_looks(node: RunningNode) -> None:
    made = create(node)
    pid = machine_pid(node, made["sandboxID"])
    node.kill()
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)
    node.start()
    assert (
        "its machine was gone when the node started again" in fetch(node, made["sandboxID"]).json()["message"]
    )


def test_a_second_node_on_the_same_data_is_refused_by_name(node: RunningNode) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "agentenv", "serve", "--port", "0"],
        env=node.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 4
    assert f"process {node.pid} already serves" in second.stderr
    assert "Traceback" not in second.stderr


def test_a_taken_port_is_told(node: RunningNode, node_directory: Any) -> None:
    port = node.url.rpartition(":")[2]
    home = node_directory / "port"
    environment = {**node.environment, "AENV_HOME": str(home), "AENV_RUNTIME": "/run/aenv-t-port"}
    second = subprocess.run(
        [sys.executable, "-m", "agentenv", "serve", "--port", port],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode != 0
    assert f"cannot listen on 127.0.0.1 port {port}" in second.stderr
    assert "Traceback" not in second.stderr


def test_sandboxes_that_expire_go_without_a_trace(node: RunningNode, audit_scope: audit.Scope) -> None:
    before = audit.snapshot(audit_scope)
    ids = [create(node, autoPause=False)["sandboxID"] for _ in range(2)]
    with node.client() as client:
        for each in ids:
            assert client.post(f"/sandboxes/{each}/timeout", json={"timeout": 1}).status_code == 204
    assert audit.settle(before, audit_scope, 30.0) == []
    for each in ids:
        assert "time-to-live ran out" in fetch(node, each).json()["message"]
