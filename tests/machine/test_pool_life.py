"""Machines held ready on a real node: taken, refilled, and never left behind."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from support.running import RunningNode

pytestmark = pytest.mark.machine

# Waiting for a pool to refill ends here, and then the test fails; a machine takes a second or two.
REFILL_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    """A node of this module's own: it is killed in between."""
    return node_factory("pool", pool_least="1", pool_most="2", max_sandboxes="4")


@pytest.fixture
def client(node: RunningNode) -> Iterator[httpx.Client]:
    with node.client() as client:
        yield client
        for each in client.get("/v2/sandboxes").json():
            client.delete(f"/sandboxes/{each['sandboxID']}")


def recorded(node: RunningNode, kind: str) -> set[str]:
    """Whose things of a kind are on record."""
    database = sqlite3.connect(node.home / "aenv.db")
    try:
        return {row[0] for row in database.execute("SELECT owner FROM resources WHERE kind = ?", (kind,))}
    finally:
        database.close()


def pooled(node: RunningNode) -> set[str]:
    """The machines that the pool has, or makes."""
    return {owner for owner in recorded(node, "process") if owner.startswith("p")}


def create(client: httpx.Client) -> tuple[dict[str, Any], bool]:
    """A sandbox, and whether its machine had been held ready."""
    answer = client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 600, "envVars": {"A": "b"}})
    assert answer.status_code == 201, answer.text
    timing = answer.headers["server-timing"]
    return answer.json(), "restore" not in timing and "prepare" not in timing


def create_from_pool(client: httpx.Client) -> dict[str, Any]:
    """Creates until one comes from the pool; the others are killed."""
    deadline = time.monotonic() + REFILL_LIMIT_S
    while True:
        made, ready = create(client)
        if ready:
            return made
        assert time.monotonic() < deadline, "the pool does not refill"
        client.delete(f"/sandboxes/{made['sandboxID']}")
        time.sleep(1)


def connected(node: RunningNode, made: dict[str, Any]) -> Sandbox:
    access: dict[str, Any] = {"api_url": node.url, "sandbox_url": node.url, "api_key": node.key}
    sandbox: Sandbox = Sandbox.connect(made["sandboxID"], request_timeout=120, **access)
    return sandbox


def test_a_machine_held_ready_becomes_this_sandbox_wholly(node: RunningNode, client: httpx.Client) -> None:
    seen = set()
    for _ in range(2):
        made = create_from_pool(client)
        sandbox = connected(node, made)
        script = (
            "hostname; cat /etc/hostname /etc/machine-id; grep -c agentenv /etc/hosts;"
            " echo $A $E2B_SANDBOX_ID; date +%s; cat /run/e2b/.E2B_SANDBOX_ID; echo;"
            " head -c 16 /dev/urandom | md5sum; id -un"
        )
        said = sandbox.commands.run(script).stdout.split()
        name = made["sandboxID"]
        assert said[:2] == [name, name]
        assert (said[3], said[4:6], said[7], said[-1]) == ("1", ["b", name], name, "user")
        assert abs(int(said[6]) - datetime.now().timestamp()) < 10
        seen |= {said[2], said[8]}
        wrong = httpx.get(
            f"{node.url}/envs", headers={"E2b-Sandbox-Id": name, "E2b-Sandbox-Port": "49983"}, trust_env=False
        )
        assert wrong.status_code == 401  # the token is the sandbox's own
    assert len(seen) == 4  # machine-ids and random numbers


def test_no_sandbox_is_refused_for_what_the_pool_holds(node: RunningNode, client: httpx.Client) -> None:
    create_from_pool(client)
    statuses = [
        client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 600}).status_code
        for _ in range(5)
    ]
    assert statuses == [201] * 3 + [503] * 2


def test_a_node_that_was_killed_reaps_its_pool_and_keeps_what_was_taken(
    node: RunningNode, client: httpx.Client
) -> None:
    made = create_from_pool(client)
    sandbox = connected(node, made)
    sandbox.commands.run("echo kept > /home/user/file")
    deadline = time.monotonic() + REFILL_LIMIT_S
    while not (before := pooled(node) - _machine_of(node, made)):
        assert time.monotonic() < deadline, "the pool does not refill"
        time.sleep(0.2)
    node.kill()
    node.start()
    assert not before & recorded(node, "process")
    assert not before & recorded(node, "slot")
    assert sandbox.commands.run("cat /home/user/file").stdout == "kept\n"
    assert made["sandboxID"] in recorded(node, "slot")


def _machine_of(node: RunningNode, made: dict[str, Any]) -> set[str]:
    database = sqlite3.connect(node.home / "aenv.db")
    try:
        query = "SELECT document ->> '$.machine.id' FROM sandboxes WHERE id = ?"
        return {row[0] for row in database.execute(query, (made["sandboxID"],))}
    finally:
        database.close()
