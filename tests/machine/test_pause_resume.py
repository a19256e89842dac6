"""Real sandboxes that sleep, wake, go back and multiply, driven with E2B's own client."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
from e2b import Sandbox
from e2b.exceptions import SandboxException

from support.running import RunningNode

pytestmark = pytest.mark.machine


COUNTING = """
import os, time
n = 0
while True:
    n += 1
    with open('/tmp/new', 'w') as file:
        file.write(str(n))
    os.replace('/tmp/new', '/tmp/n')  # whoever looks sees a number
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    """A node of this module's own: it is killed in between."""
    return node_factory("pause")


@pytest.fixture
def make(node: RunningNode, host_audit: None) -> Iterator[Callable[..., Sandbox]]:
    """Makes sandboxes; afterwards none is left, and the host is as it was."""

    def factory(template: str = "base", **given: Any) -> Sandbox:
        return Sandbox.create(template, **{**access(node), "timeout": 600, **given})

    yield factory
    with node.client() as client:
        for each in client.get("/v2/sandboxes").json():
            client.delete(f"/sandboxes/{each['sandboxID']}")
        for each in client.get("/snapshots").json():
            client.delete(f"/templates/{each['snapshotID']}")


@pytest.fixture
def sandbox(make: Callable[..., Sandbox]) -> Sandbox:
    return make()


def access(node: RunningNode) -> dict[str, Any]:
    return {"api_url": node.url, "sandbox_url": node.url, "api_key": node.key, "request_timeout": 120}


def said(sandbox: Sandbox, command: str) -> list[str]:
    return list(sandbox.commands.run(command).stdout.split())


def state_of(node: RunningNode, sandbox: Sandbox) -> str:
    with node.client() as client:
        return str(client.get(f"/sandboxes/{sandbox.sandbox_id}").json()["state"])


def machines(node: RunningNode) -> list[str]:
    """The machines of sandboxes on record that have a process; those held ready do not count."""
    database = sqlite3.connect(node.home / "aenv.db")
    try:
        query = "SELECT owner FROM resources WHERE kind = 'process' AND owner NOT LIKE 'p%'"
        return [row[0] for row in database.execute(query)]
    finally:
        database.close()


def test_processes_files_and_memory_go_on(sandbox: Sandbox) -> None:
    sandbox.files.write("/home/user/file", "data")
    sandbox.files.write("/home/user/count.py", COUNTING)
    counting = sandbox.commands.run("exec python3 /home/user/count.py", background=True)
    sandbox.commands.run("until [ -s /tmp/n ]; do sleep 0.05; done; echo shm > /dev/shm/kept")
    boot, names = (
        said(sandbox, "cat /proc/sys/kernel/random/boot_id"),
        said(sandbox, "hostname; cat /etc/machine-id"),
    )
    assert sandbox.pause()
    assert not sandbox.is_running()
    assert not sandbox.pause()  # it is already
    sandbox.connect(timeout=600)
    assert sandbox.files.read("/home/user/file") == "data"
    assert said(sandbox, "cat /dev/shm/kept") == ["shm"]
    assert said(sandbox, "cat /proc/sys/kernel/random/boot_id") == boot
    assert said(sandbox, "hostname; cat /etc/machine-id") == names
    assert names[0] == sandbox.sandbox_id
    one = int(said(sandbox, "cat /tmp/n")[0])
    sandbox.commands.run(
        f"for i in $(seq 400); do [ $(cat /tmp/n) -gt {one} ] && exit 0; sleep 0.05; done; exit 1"
    )
    assert said(sandbox, f"ps -o pid= -p {counting.pid}") == [str(counting.pid)]


def test_a_paused_one_holds_no_machine(node: RunningNode, sandbox: Sandbox) -> None:
    assert machines(node) == [sandbox.sandbox_id]
    sandbox.pause()
    with node.client() as client:  # its next operation waits for what is done after the answer
        assert client.post(f"/sandboxes/{sandbox.sandbox_id}/snapshots").status_code == 201
        deadline = time.monotonic() + 20
        while machines(node) and time.monotonic() < deadline:
            client.get("/health")
    assert machines(node) == []
    assert state_of(node, sandbox) == "paused"


def test_the_clock_is_the_hosts_after_a_sleep(sandbox: Sandbox) -> None:
    uptime = float(said(sandbox, "cut -d' ' -f1 /proc/uptime")[0])
    sandbox.pause()
    time.sleep(3)  # what is to be seen is that time went on
    sandbox.connect(timeout=600)
    before = time.time()
    told = float(said(sandbox, "date +%s.%N")[0])
    assert before - 2 <= told <= time.time() + 2  # it is told, and hears of it as late as the host is loaded
    assert float(said(sandbox, "cut -d' ' -f1 /proc/uptime")[0]) >= uptime


def test_ten_resumes_at_once(node: RunningNode, sandbox: Sandbox) -> None:
    sandbox.pause()
    statuses: list[int] = []

    def connect() -> None:
        with node.client() as client:
            path = f"/v2/sandboxes/{sandbox.sandbox_id}/connect"
            statuses.append(client.post(path, json={"timeout": 600}).status_code)

    threads = [threading.Thread(target=connect) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] * 9 + [201]
    assert machines(node) == [sandbox.sandbox_id]


def test_the_disk_alone(sandbox: Sandbox) -> None:
    sandbox.files.write("/home/user/file", "data")
    boot, names = (
        said(sandbox, "cat /proc/sys/kernel/random/boot_id"),
        said(sandbox, "hostname; cat /etc/machine-id"),
    )
    sandbox.pause(mode="filesystem")
    sandbox.connect(timeout=600)
    assert sandbox.files.read("/home/user/file") == "data"
    assert said(sandbox, "cat /proc/sys/kernel/random/boot_id") != boot
    assert said(sandbox, "hostname; cat /etc/machine-id") == names


def test_it_is_paused_at_its_end_and_traffic_wakes_it(
    node: RunningNode, make: Callable[..., Sandbox]
) -> None:
    lifecycle = {"on_timeout": "pause", "auto_resume": True}
    sandbox = make(timeout=2, lifecycle=lifecycle)
    while state_of(node, sandbox) == "running":
        time.sleep(0.1)
    assert said(sandbox, "echo awake") == ["awake"]
    with node.client() as client:
        client.post(f"/sandboxes/{sandbox.sandbox_id}/timeout", json={"timeout": 600})
    assert state_of(node, sandbox) == "running"


def test_an_answered_pause_survives_the_node(node: RunningNode, sandbox: Sandbox) -> None:
    sandbox.files.write("/home/user/file", "data")
    sandbox.commands.run("sleep 1000 &")
    for _ in range(3):
        sandbox.pause()
        node.kill()
        node.start()
        assert state_of(node, sandbox) == "paused"
        sandbox.connect(timeout=600)
        assert sandbox.files.read("/home/user/file") == "data"
        assert said(sandbox, "pgrep -c sleep") == ["1"]
        node.kill()  # and what it stands on is known again
        node.start()
        sandbox.files.write("/home/user/file", "data")


@pytest.mark.parametrize("moment_s", [0.0, 0.02, 0.05, 0.1, 0.2])
def test_a_node_that_dies_in_the_midst_of_a_pause(
    node: RunningNode, sandbox: Sandbox, moment_s: float
) -> None:
    """Whenever it dies: the sandbox runs or is paused, whole."""
    sandbox.files.write("/home/user/file", "data")
    with node.client() as client:
        begun = threading.Thread(target=_quiet_pause, args=(client, sandbox.sandbox_id))
        begun.start()
        time.sleep(moment_s)
        node.kill()
        begun.join()
    node.start()
    assert state_of(node, sandbox) in ("running", "paused")
    sandbox.connect(timeout=600)
    assert sandbox.files.read("/home/user/file") == "data"
    assert sandbox.pause()
    sandbox.connect(timeout=600)
    assert sandbox.files.read("/home/user/file") == "data"


def _quiet_pause(client: httpx.Client, sandbox_id: str) -> None:
    try:
        client.post(f"/sandboxes/{sandbox_id}/pause")
    except httpx.HTTPError:
        pass  # the node was killed


def test_a_checkpoint_and_what_is_made_of_it(make: Callable[..., Sandbox], node: RunningNode) -> None:
    sandbox = make(envs={"WHO": "source"}, metadata={"k": "v"})
    sandbox.files.write("/home/user/file", "before")
    snapshot = sandbox.create_snapshot("first")
    sandbox.files.write("/home/user/file", "after")
    child = make(snapshot.snapshot_id)
    assert child.files.read("/home/user/file") == "before"
    assert said(child, "hostname; echo $WHO; echo $E2B_SANDBOX_ID") == [
        child.sandbox_id,
        "source",
        child.sandbox_id,
    ]
    assert said(child, "cat /etc/machine-id") != said(sandbox, "cat /etc/machine-id")
    child.files.write("/home/user/file", "the child's")
    assert sandbox.files.read("/home/user/file") == "after"
    with node.client() as client:
        back = client.post(
            f"/sandboxes/{sandbox.sandbox_id}/rollback", json={"snapshotID": snapshot.snapshot_id}
        )
        assert back.status_code == 200, back.text
    assert sandbox.files.read("/home/user/file") == "before"  # the same object: same id, address and token
    sandbox.kill()
    assert make("first").files.read("/home/user/file") == "before"
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **access(node))
    assert not Sandbox.delete_snapshot(snapshot.snapshot_id, **access(node))
    with pytest.raises(SandboxException, match="not found"):
        make("first")
    assert child.files.read("/home/user/file") == "the child's"


def test_a_damaged_layer_is_told_and_leaves_it_paused(node: RunningNode, sandbox: Sandbox) -> None:
    sandbox.pause()
    with node.client() as client:
        path = f"/sandboxes/{sandbox.sandbox_id}"
        snapshot = client.get(path).json()["snapshotID"]
        layer = node.home / "snapshots" / snapshot / "memory"
        content = layer.read_bytes()
        layer.write_bytes(content[:-4096])
        answer = client.post(f"{path}/connect", json={"timeout": 600})
        assert answer.status_code == 500
        assert "memory has" in answer.json()["message"]
        shown = client.get(path).json()
        assert (shown["state"], "memory has" in shown["reason"]) == ("paused", True)
        assert machines(node) == []
        layer.write_bytes(content)
        assert client.post(f"{path}/connect", json={"timeout": 600}).status_code == 201
        assert "reason" not in client.get(path).json()
    assert said(sandbox, "echo well") == ["well"]


def test_how_long_each_part_took_is_told(node: RunningNode, sandbox: Sandbox) -> None:
    with node.client() as client:
        paused = client.post(f"/sandboxes/{sandbox.sandbox_id}/pause")
        resumed = client.post(f"/sandboxes/{sandbox.sandbox_id}/connect", json={"timeout": 600})
        started = client.get(f"/sandboxes/{sandbox.sandbox_id}").json()["startedAt"]
    assert {"stop", "capture", "publish", "total"} <= _parts(paused)
    assert {"run", "agent", "total"} <= _parts(resumed)
    assert datetime.fromisoformat(started).tzinfo is not None


def _parts(answer: httpx.Response) -> set[str]:
    return {part.partition(";")[0].strip() for part in answer.headers["server-timing"].split(",")}


def test_nothing_is_left_of_those_that_are_gone(node: RunningNode) -> None:
    """The last test: by and by only the template's first snapshot remains."""
    deadline = time.monotonic() + 60
    while len(left := list((node.home / "snapshots").iterdir())) > 1 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert len(left) == 1
    assert {path.name for path in left[0].iterdir()} == {"state", "memory", "disk"}
