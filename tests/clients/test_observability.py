"""What E2B's unmodified clients see of a sandbox: its figures, its log, and the events beside them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from e2b import NotFoundException, Sandbox

from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

MIB = 1 << 20


@pytest.fixture
def followed(node: RunningNode) -> Iterator[list[dict[str, Any]]]:
    """Events of the node from now on, as they come."""
    found: list[dict[str, Any]] = []
    there = threading.Event()

    def follow(client: httpx.Client, answers: list[httpx.Response]) -> None:
        try:
            with client.stream("GET", "/events", timeout=60) as answer:
                answers.append(answer)
                for line in answer.iter_lines():
                    there.set()
                    if line.startswith("data: "):
                        found.append(json.loads(line[6:]))
                        if found[-1]["kind"] == "killed":
                            return
        except httpx.HTTPError:
            there.set()

    with node.client() as client:
        following = threading.Thread(target=follow, args=(client, []), daemon=True)
        following.start()
        assert there.wait(30)
        yield found
        following.join(30)


def test_figures_logs_and_events_of_a_life(
    node: RunningNode, sandbox_factory: Callable[..., Sandbox], followed: list[dict[str, Any]]
) -> None:
    sandbox = sandbox_factory(metadata={"job": "seen"})
    sandbox.commands.run("echo the guest speaks > /dev/console", user="root")
    sandbox.commands.run("head -c 100M /dev/zero > /dev/shm/much", user="root")

    before = sandbox.get_metrics()
    assert before
    newest = before[-1]
    assert newest.cpu_count == 1
    assert 0 <= newest.cpu_used_pct <= 100
    assert 50 * MIB < newest.mem_used < newest.mem_total <= 512 * MIB
    assert 0 < newest.disk_used < newest.disk_total <= 2048 * MIB
    assert Sandbox.get_metrics(sandbox.sandbox_id, start=newest.timestamp)[0].timestamp >= before[0].timestamp

    with node.client() as client:
        scrape = client.get("/metrics/sandboxes").raise_for_status().text
        log = client.get(f"/v2/sandboxes/{sandbox.sandbox_id}/logs").raise_for_status().json()["logs"]
    sent = re.search(rf'_network_sent_bytes_total{{sandbox="{sandbox.sandbox_id}"}} (\S+)', scrape)
    assert sent is not None and float(sent[1]) > 0
    assert log[0]["message"] == "Sandbox created"
    assert "the guest speaks" in [entry["message"] for entry in log]
    assert sandbox.kill()
    with pytest.raises(NotFoundException):
        Sandbox.get_metrics("inothere")
    kinds = [event["kind"] for event in followed if event.get("sandboxID") == sandbox.sandbox_id]
    assert kinds[0] == "created"
