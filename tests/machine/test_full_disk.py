"""A node whose data directory is full: what cannot be written is told, and everything goes on after.

The directory is a small filesystem of its own, so that machines, snapshots and records all lack space.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from support.fixtures import LOGS
from support.home import small_home
from support.running import RunningNode
from support.wholeness import require_whole

pytestmark = pytest.mark.machine

MIB = 1 << 20
SIZE_MIB = 640

# Until a machine that stands still goes on; the node tries every 5 s.
GOES_ON_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def node(node_directory: Path) -> Iterator[RunningNode]:
    LOGS.mkdir(exist_ok=True)
    with small_home(node_directory / "full", SIZE_MIB * MIB) as home:
        node = RunningNode(
            home,
            Path(f"/run/aenv-t-{os.getpid()}-full"),
            LOGS / "full.log",
            pool_most="0",
            slots_least="0",
            slots_most="0",
            disk_floor_mib="0",
            disk_overcommit="1000",
        )
        try:
            yield node
            require_whole(node)
        finally:
            node.close()


@pytest.fixture
def sandbox(node: RunningNode, host_audit: None) -> Iterator[Sandbox]:
    made = node.sandbox("base")
    made.commands.run("echo mark | tee /dev/shm/mark > /home/user/mark; sleep 100000 &")
    yield made
    made.kill()
    require_whole(node)


@contextmanager
def filled(node: RunningNode, left: int) -> Iterator[None]:
    """The filesystem full but for some bytes."""
    ballast = node.home / "ballast"
    try:
        with ballast.open("wb") as file:
            free = os.statvfs(node.home)
            os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - left - MIB))
            block = bytes(4096)
            try:
                while (free := os.statvfs(node.home)).f_bavail * free.f_frsize > left:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, len(block))
            except OSError:
                pass  # full
        yield
    finally:
        ballast.unlink()


def post(node: RunningNode, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    with node.client() as client:
        return client.post(path, json=body)


def state_of(node: RunningNode, sandbox: Sandbox) -> str:
    with node.client() as client:
        return str(client.get(f"/sandboxes/{sandbox.sandbox_id}").json()["state"])


def until_it_goes_on(node: RunningNode, sandbox: Sandbox) -> None:
    deadline = time.monotonic() + GOES_ON_LIMIT_S
    while told(node, sandbox) != 200:
        assert time.monotonic() < deadline, "it does not go on"
        time.sleep(0.2)


def marks(sandbox: Sandbox) -> list[str]:
    return list(sandbox.commands.run("cat /dev/shm/mark /home/user/mark; pgrep -c -x sleep").stdout.split())


def contents(node: RunningNode) -> dict[str, str]:
    """The files of all snapshots, by their digests."""
    found = {}
    for path in sorted((node.home / "snapshots").rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


@pytest.mark.parametrize("left", [0, 4 * MIB], ids=["not-even-for-records", "a-little-left"])
def test_what_cannot_be_captured_runs_on(node: RunningNode, sandbox: Sandbox, left: int) -> None:
    """Its parent's files are as they were, and nothing is left of the attempts."""
    sandbox.commands.run("head -c 20000000 /dev/urandom > /dev/shm/much; sync")
    before = contents(node)
    with filled(node, left):
        for path in ("pause", "snapshots", "fork"):
            answer = post(node, f"/sandboxes/{sandbox.sandbox_id}/{path}")
            assert (answer.status_code, answer.json()["code"]) == (507, 507), answer.text
            assert "space" in answer.json()["message"]
            assert state_of(node, sandbox) == "running"
            if left:  # else whatever the guest writes by itself makes it stand still
                assert marks(sandbox) == ["mark", "mark", "1"]
        # Not for a new one either; it is told, and nothing is left of it.
        answer = post(node, "/v2/sandboxes", {"templateID": "base", "timeout": 60})
        assert answer.status_code in (201, 503, 507), answer.text
        if answer.status_code == 201:  # an empty layer is small
            with node.client() as client:
                assert client.delete(f"/sandboxes/{answer.json()['sandboxID']}").status_code == 204
        assert contents(node) == before
    until_it_goes_on(node, sandbox)
    assert sandbox.pause()
    sandbox.connect(timeout=600)
    assert marks(sandbox) == ["mark", "mark", "1"]
    assert sandbox.commands.run("wc -c < /dev/shm/much").stdout == "20000000\n"
    assert before.items() <= contents(node).items()


def test_a_build_that_finds_no_space_fails_and_says_so(node: RunningNode, host_audit: None) -> None:
    """It does not wait for space, nothing of it is left, and what was done before is kept."""
    node.sandbox("base").kill()  # whose own first snapshot takes space too
    texts = ["echo kept", "head -c 150000000 /dev/zero > much; sync"]
    with filled(node, 80 * MIB):
        status = built(node, "crowded", texts)
        assert status["status"] == "error"
        assert status["reason"]["step"] == "2", status
        assert "space" in status["reason"]["message"].lower(), status
    status = built(node, "crowded", texts[:1])
    assert status["status"] == "ready", status
    require_whole(node)


def built(node: RunningNode, name: str, texts: list[str]) -> dict[str, Any]:
    """Build on `base`; the status at the end, with the log."""
    steps = [{"type": "RUN", "args": [text]} for text in texts]
    with node.client() as client:
        asked = client.post("/v3/templates", json={"name": name}).json()
        path = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
        assert client.post(f"/v2{path}", json={"fromTemplate": "base", "steps": steps}).status_code == 202
        deadline = time.monotonic() + 240
        while (status := client.get(f"{path}/status").json())["status"] in ("waiting", "building"):
            assert time.monotonic() < deadline, status
            time.sleep(0.1)
    return dict(status)


def test_a_guest_that_cannot_write_stands_still_until_it_can(node: RunningNode, sandbox: Sandbox) -> None:
    """Nobody hangs: who is connected is cut off, who comes is told why. What it was writing is whole."""
    sandbox.commands.run("head -c 8000000 /dev/urandom > /dev/shm/data")
    # More than what ended before can still give back while this runs.
    parts = " ".join(["/dev/shm/data"] * 12)
    write = f"cat {parts} > /home/user/written; sync"
    with filled(node, 3 * MIB):
        with pytest.raises(Exception, match=r"(?s)."):
            sandbox.commands.run(write, timeout=120)
        assert told(node, sandbox) == 507
        assert post(node, f"/sandboxes/{sandbox.sandbox_id}/pause").status_code == 507
        assert post(node, f"/sandboxes/{sandbox.sandbox_id}/snapshots").status_code == 507
    until_it_goes_on(node, sandbox)
    same = "until ! pgrep -x cat > /dev/null; do sleep 0.1; done; sync"
    same += f"; cat {parts} | cmp - /home/user/written && echo same"
    assert sandbox.commands.run(same).stdout == "same\n"
    assert marks(sandbox) == ["mark", "mark", "1"]
    sandbox.pause()
    sandbox.connect(timeout=600)
    assert sandbox.commands.run(same).stdout == "same\n"


def told(node: RunningNode, sandbox: Sandbox) -> int:
    """The status of a call to its agent."""
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": str(sandbox._envd_access_token),
    }
    parameters = {"path": "/home/user/mark", "username": "user"}
    return httpx.get(
        f"{node.url}/files", params=parameters, headers=headers, timeout=60, trust_env=False
    ).status_code


def test_one_that_stands_still_is_killed(node: RunningNode, host_audit: None) -> None:
    sandbox = node.sandbox("base")
    ended = threading.Event()

    def write() -> None:
        # More than what ended before can still give back while this runs.
        with suppress(Exception):
            sandbox.commands.run("head -c 500000000 /dev/urandom > /home/user/much; sync", timeout=120)
        ended.set()

    with filled(node, 3 * MIB):
        threading.Thread(target=write).start()
        assert ended.wait(GOES_ON_LIMIT_S)
        assert told(node, sandbox) == 507
        with node.client() as client:
            assert client.delete(f"/sandboxes/{sandbox.sandbox_id}").status_code == 204
    require_whole(node)
