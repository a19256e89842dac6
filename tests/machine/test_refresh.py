"""Real sandboxes that give memory back and go on: their processes, their files, and whoever talks to them."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from support.running import RunningNode

pytestmark = pytest.mark.machine

CHURN = "for n in 1 2 3; do head -c 100M /dev/urandom > /dev/shm/blob; done; sha256sum < /dev/shm/blob"
LIMIT_S = 90


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    """A node whose host always has too little memory."""
    return node_factory("refresh", pressure="refresh", pressure_below_mib=str(1 << 24), pressure_idle_s="0.5")


@pytest.fixture
def sandbox(node: RunningNode, host_audit: None) -> Iterator[Sandbox]:
    sandbox = node.sandbox("base")
    yield sandbox
    sandbox.kill()


def pid_of(node: RunningNode, sandbox: Sandbox) -> int:
    database = sqlite3.connect(f"file:{node.home}/aenv.db?mode=ro", uri=True)
    try:
        query = "SELECT detail ->> 'pid' FROM resources WHERE kind = 'process' AND owner = ?"
        row = database.execute(query, [sandbox.sandbox_id]).fetchone()
        return int(row[0] or 0) if row else 0
    finally:
        database.close()


def own_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def template_digests(node: RunningNode) -> set[str]:
    """Of what is in the snapshot of the template, which all its sandboxes map."""
    database = sqlite3.connect(f"file:{node.home}/aenv.db?mode=ro", uri=True)
    try:
        ids = [row[0] for row in database.execute("SELECT id FROM snapshots WHERE kind = 'template'")]
    finally:
        database.close()
    assert ids
    files = [file for name in ids for file in sorted((node.home / "snapshots" / name).iterdir())]
    return {f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files}


def test_an_idle_one_gives_its_memory_back(node: RunningNode, sandbox: Sandbox) -> None:
    shared = template_digests(node)
    digest = sandbox.commands.run(CHURN).stdout.split()[0]
    sandbox.files.write("/home/user/file", "data")
    said: list[str] = []
    waiting = threading.Thread(
        target=lambda: said.append(sandbox.commands.run("read x < ~/go; echo $x", timeout=0).stdout)
    )
    sandbox.commands.run("mkfifo ~/go; sleep 1000 > /dev/null 2>&1 &")
    waiting.start()
    pid, deadline = pid_of(node, sandbox), time.monotonic() + LIMIT_S
    assert own_mib(pid) > 100
    while pid_of(node, sandbox) in (pid, 0) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert pid_of(node, sandbox) not in (pid, 0), node.log.read_text()[-2000:]
    assert sandbox.files.read("/home/user/file") == "data"
    assert own_mib(pid_of(node, sandbox)) < 100
    assert sandbox.commands.run("sha256sum < /dev/shm/blob; pgrep -c sleep").stdout.split() == [
        digest,
        "-",
        "1",
    ]
    sandbox.commands.run("echo gone on > ~/go")  # over the connection from before
    waiting.join(30)
    assert said == ["gone on\n"]
    assert template_digests(node) == shared
    with node.client() as client:  # and it can be paused, and restored, as ever
        shown = client.get(f"/sandboxes/{sandbox.sandbox_id}").json()
    assert shown["state"] == "running"
    sandbox.pause()
    sandbox.connect(timeout=600)
    assert sandbox.commands.run("sha256sum < /dev/shm/blob").stdout.split()[0] == digest
    assert template_digests(node) == shared
