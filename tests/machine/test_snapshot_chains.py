"""Long lives: one sandbox paused and resumed again and again, and checkpoints upon checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import httpx
import pytest
from e2b import Sandbox

from support.marked import delete_checkpoints
from support.running import RunningNode
from support.wholeness import require_whole

pytestmark = pytest.mark.machine

SOAK = bool(os.environ.get("AENV_TEST_SOAK"))
CYCLES = 100 if SOAK else 5
CHECKPOINTS = 40 if SOAK else 4
LIMIT_S = 3600 if SOAK else 300


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    return node_factory("chains")


@pytest.fixture
def sandbox(node: RunningNode, host_audit: None) -> Iterator[Sandbox]:
    """A sandbox; afterwards nothing is left of it, nor of what was made of it."""
    made = node.sandbox("base")
    yield made
    made.kill()
    delete_checkpoints(node)
    require_whole(node)


def at_once(node: RunningNode, sandbox: Sandbox, path: str) -> httpx.Response:
    """One call on a connection of its own, without a retry."""
    return httpx.get(
        f"{node.url}/files",
        params={"path": path, "username": "user"},
        headers={
            "E2b-Sandbox-Id": sandbox.sandbox_id,
            "E2b-Sandbox-Port": "49983",
            "X-Access-Token": str(sandbox._envd_access_token),
        },
        timeout=60,
        trust_env=False,
    )


@pytest.mark.timeout(LIMIT_S)
def test_paused_and_resumed_again_and_again(node: RunningNode, sandbox: Sandbox) -> None:
    """The first call after each resume succeeds; memory, disk and a process go on from where they were."""
    sandbox.commands.run("echo 0 > /dev/shm/count; sleep 1000000 &")
    written = []
    for number in range(CYCLES):
        sandbox.files.write(f"/home/user/{number}", f"content {number}")
        sandbox.commands.run("echo $(($(cat /dev/shm/count) + 1)) > /dev/shm/count")
        written.append(f"content {number}")
        sandbox.pause()
        sandbox.connect(timeout=600)
        answer = at_once(node, sandbox, f"/home/user/{number}")
        assert (answer.status_code, answer.text) == (200, written[-1])
        told = sandbox.commands.run("cat /dev/shm/count; pgrep -c -x sleep").stdout.split()
        assert told == [f"{number + 1}", "1"]
    command = f"for i in $(seq 0 {CYCLES - 1}); do cat /home/user/$i; echo; done"
    assert sandbox.commands.run(command).stdout.splitlines() == written


@pytest.mark.timeout(LIMIT_S)
def test_every_checkpoint_of_a_chain_can_be_started_from(node: RunningNode, sandbox: Sandbox) -> None:
    """Those in the midst of it as well, each with what was in the memory and on the disk then; the source
    goes back to any of them, and all are there when it is gone."""
    points = []
    for number in range(CHECKPOINTS):
        # Some of it is changed each time, some only once.
        sandbox.commands.run(
            f"echo {number} | tee /dev/shm/last /home/user/last > /home/user/{number};"
            f" head -c 2000000 /dev/urandom > /dev/shm/{number};"
            f" md5sum /dev/shm/[0-9]* > /home/user/sums"
        )
        points.append(sandbox.create_snapshot().snapshot_id)
    names = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id"
    before = sandbox.commands.run(names).stdout
    with node.client() as client:
        back = client.post(f"/sandboxes/{sandbox.sandbox_id}/rollback", json={"snapshotID": points[1]})
        assert back.status_code == 200, back.text
        assert_is(sandbox, 1)
        assert sandbox.commands.run(names).stdout == before
        assert client.delete(f"/sandboxes/{sandbox.sandbox_id}").status_code == 204
    some = range(CHECKPOINTS) if SOAK else (0, CHECKPOINTS // 2, CHECKPOINTS - 1)
    for number in some:
        child = node.sandbox(points[number])
        assert_is(child, number)
        child.kill()


def assert_is(sandbox: Sandbox, number: int) -> None:
    """A sandbox has what there was when checkpoint `number` was taken."""
    told = sandbox.commands.run(
        "cat /dev/shm/last /home/user/last; ls /home/user | grep -c '^[0-9]';"
        " md5sum --quiet -c /home/user/sums && echo same"
    )
    assert told.stdout.split() == [f"{number}", f"{number}", f"{number + 1}", "same"]
