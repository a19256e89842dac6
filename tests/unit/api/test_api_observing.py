"""E2B's calls of metrics and logs over HTTP, with parts in memory behind them."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest

from agentenv.api.app import create_app
from agentenv.observe.observation import Observation
from agentenv.sandbox.observing import Running
from support.sandbox_parts import MemoryNode, quiet, wanted

KEY = "e2b_0123456789abcdef"
MIB = 1 << 20


async def said(running: Running) -> Mapping[str, object]:
    """What each guest answers."""
    return {"mem_used": 64 * MIB, "mem_total": 480 * MIB, "disk_used": 700 * MIB, "disk_total": 1900 * MIB}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[MemoryNode]:
    node = MemoryNode(tmp_path)
    await node.service.start()
    await node.prepare()
    yield node
    await node.service.stop()


@pytest.fixture
async def client(node: MemoryNode) -> AsyncIterator[httpx.AsyncClient]:
    observation = Observation(node.service, ask=said)
    app = create_app(
        node.service,
        node.templates,
        node.settings,
        keys=node.keys(KEY),
        port=8000,
        observation=observation,
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:8000", headers={"X-API-KEY": KEY}
    ) as client:
        yield client


async def test_metrics_are_there_at_once_with_the_names_of_e2b(
    client: httpx.AsyncClient, node: MemoryNode
) -> None:
    sandbox = (await node.service.create(wanted())).sandbox
    node.hypervisor.machines[machine_of(node)].pid = os.getpid()
    answer = await client.get(f"/sandboxes/{sandbox.id}/metrics")
    assert answer.status_code == 200
    [metric] = answer.json()
    assert metric["timestampUnix"] > 0 and metric["timestamp"].endswith("Z")
    assert {name: metric[name] for name in metric if not name.startswith("timestamp")} == {
        "cpuCount": 1,
        "cpuUsedPct": 0.0,
        "memUsed": 64 * MIB,
        "memTotal": 480 * MIB,
        "memCache": 0,
        "diskUsed": 700 * MIB,
        "diskTotal": 1900 * MIB,
    }
    later = metric["timestampUnix"] + 1
    assert (await client.get(f"/sandboxes/{sandbox.id}/metrics?start={later}")).json() == []
    assert len((await client.get(f"/sandboxes/{sandbox.id}/metrics?end={later}")).json()) == 1
    many = (await client.get(f"/sandboxes/metrics?sandbox_ids={sandbox.id},inone")).json()
    assert many == {"sandboxes": {sandbox.id: metric}}


def machine_of(node: MemoryNode) -> str:
    [name] = node.hypervisor.machines
    return name


async def test_what_is_wrong_is_said(client: httpx.AsyncClient) -> None:
    for path in ("/sandboxes/inone/metrics", "/sandboxes/inone/logs", "/v2/sandboxes/inone/logs"):
        answer = await client.get(path)
        assert answer.status_code == 404
        assert answer.json()["code"] == 404
    many = ",".join(f"i{number}" for number in range(101))
    assert (await client.get(f"/sandboxes/metrics?sandbox_ids={many}")).status_code == 400
    for query in ("direction=up", "level=loud", "cursor=-1", "limit=1001"):
        assert (await client.get(f"/v2/sandboxes/inone/logs?{query}")).status_code == 400


async def test_a_log_has_the_life_and_the_console(client: httpx.AsyncClient, node: MemoryNode) -> None:
    sandbox = (await node.service.create(wanted())).sandbox
    node.hypervisor.machines[machine_of(node)].write(b"Hello from the guest\n")
    await node.service.pause(sandbox.id)
    await quiet()
    await node.service.connect(sandbox.id, 60)
    await node.service.checkpoint(sandbox.id, "kept")
    await node.service.set_timeout(sandbox.id, 90)
    await node.service.kill(sandbox.id)
    answer = (await client.get(f"/sandboxes/{sandbox.id}/logs")).json()
    assert [entry["message"] for entry in answer["logEntries"]] == [
        "Sandbox created",
        "Hello from the guest",
        "Sandbox paused",
        "Sandbox resumed",
        "Sandbox checkpointed",
        "Sandbox updated",
        "Sandbox killed: killed",
    ]
    lines = [json.loads(each["line"]) for each in answer["logs"]]
    assert [line["logger"] for line in lines] == ["sandbox", "console", *["sandbox"] * 5]
    assert [line["level"] for line in lines][-2:] == ["debug", "info"]
    url = f"/v2/sandboxes/{sandbox.id}/logs"
    back = (await client.get(f"{url}?direction=backward&limit=2&level=info")).json()["logs"]
    assert [entry["message"] for entry in back] == ["Sandbox killed: killed", "Sandbox checkpointed"]
    assert back[1]["fields"]["names"] == "kept:default"
    found = (await client.get(f"{url}?search=GUEST")).json()["logs"]
    assert [entry["fields"] for entry in found] == [{"logger": "console"}]


async def test_a_failure_is_an_error_in_the_log(client: httpx.AsyncClient, node: MemoryNode) -> None:
    sandbox = (await node.service.create(wanted())).sandbox
    node.hypervisor.machines[machine_of(node)].die("signal 11")
    await quiet(50)
    [entry] = (await client.get(f"/v2/sandboxes/{sandbox.id}/logs?level=error")).json()["logs"]
    assert entry["message"] == "Sandbox failed: its machine crashed: signal 11"
