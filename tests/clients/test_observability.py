"""What E2B's unmodified client sees of a sandbox: its figures, and its log and events beside them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from e2b import NotFoundException, Sandbox

from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

MIB = 1 << 20
LIMIT_S = 30.0


def test_figures_logs_and_events_of_a_life(
    node: RunningNode, sandbox_factory: Callable[..., Sandbox]
) -> None:
    sandbox = sandbox_factory(metadata={"job": "seen"})
    name = sandbox.sandbox_id
    sandbox.commands.run("echo the guest speaks > /dev/console", user="root")
    sandbox.commands.run("head -c 100M /dev/zero > /dev/shm/much", user="root")

    limit = time.monotonic() + LIMIT_S
    while (newest := sandbox.get_metrics()[-1]).mem_used < 100 * MIB and time.monotonic() < limit:
        time.sleep(0.5)  # a sample is taken when the last one is five seconds old
    assert newest.cpu_count == 1
    assert 0 <= newest.cpu_used_pct <= 100
    assert 100 * MIB < newest.mem_used < newest.mem_total <= 512 * MIB
    assert 0 < newest.disk_used < newest.disk_total <= 2048 * MIB
    with pytest.raises(NotFoundException):
        Sandbox.get_metrics("inothere")

    with node.client() as client:
        scrape = client.get("/metrics/sandboxes").raise_for_status().text
        sent = re.search(rf'_network_sent_bytes_total{{sandbox="{name}"}} (\S+)', scrape)
        assert sent is not None and float(sent[1]) > 0
        assert sandbox.kill()
        log = client.get(f"/v2/sandboxes/{name}/logs").raise_for_status().json()["logs"]
        events = list(life(node, name))
    assert log[0]["message"] == "Sandbox created"
    assert "the guest speaks" in [entry["message"] for entry in log]
    assert [event["kind"] for event in events] == ["created", "killed"]
    assert events[0]["metadata"] == {"job": "seen"}


def life(node: RunningNode, name: str) -> Iterator[dict[str, Any]]:
    """All events of a sandbox that was killed."""
    query = {"sandbox_id": name, "after": "of an earlier life"}
    with node.client() as client, client.stream("GET", "/events", params=query) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: ") and (event := json.loads(line[6:])):
                yield event
                if event["kind"] == "killed":
                    return
