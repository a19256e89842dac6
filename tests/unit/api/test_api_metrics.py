"""The node's metrics, read as Prometheus reads them and compared with what was done."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agentenv.api.app import create_app
from agentenv.errors import HostFault
from agentenv.observe.observation import Observation
from agentenv.proxy.plane import DataPlane
from support.sandbox_parts import MemoryNode, quiet, wanted

KEY = "e2b_0123456789abcdef"
DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "observability.md"


@dataclass
class Watched:
    node: MemoryNode
    observation: Observation
    client: httpx.AsyncClient

    async def scrape(self, path: str = "/metrics", **headers: str) -> dict[str, float]:
        answer = await self.client.get(path, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = text_string_to_metric_families(answer.text)
        return {_named(sample): sample.value for family in families for sample in family.samples}


def _named(sample: Sample) -> str:
    return " ".join([sample.name, *(f"{label}={value}" for label, value in sorted(sample.labels.items()))])


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    node = MemoryNode(tmp_path, max_sandboxes=3)
    observation = Observation(node.service)
    await node.service.start()
    await node.prepare()
    app = create_app(
        node.service,
        node.templates,
        node.settings,
        keys=node.keys(KEY),
        port=8000,
        observation=observation,
    )
    observation.metrics.plane = DataPlane(node.service, node.settings)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        yield Watched(node, observation, client)
    await node.service.stop()


async def test_operations_are_counted_by_outcome_and_timed_by_phase(watched: Watched) -> None:
    service, steps = watched.node.service, watched.node.steps
    before = await watched.scrape()
    sandbox = (await service.create(wanted())).sandbox
    await service.pause(sandbox.id)
    await quiet()
    await service.connect(sandbox.id, 60)
    steps.fail("restore", HostFault("no process"))
    with pytest.raises(HostFault):
        await service.create(wanted())
    after = await watched.scrape()

    def more(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert more("aenv_operations_total operation=create outcome=ok") == 1
    assert more("aenv_operations_total operation=create outcome=host") == 1
    assert more("aenv_operations_total operation=pause outcome=ok") == 1
    assert more("aenv_operation_seconds_count operation=create") == 1
    assert more("aenv_phase_seconds_count operation=pause phase=capture") == 1
    assert more("aenv_phase_seconds_bucket le=+Inf operation=resume phase=restore") == 1
    assert more("aenv_sandbox_changes_total change=created") == 1
    assert more("aenv_sandbox_changes_total change=failed") == 1
    assert more("aenv_sandboxes state=running") == 1
    assert more("aenv_node_promised resource=vcpus") == 1
    assert after["aenv_node_capacity resource=sandboxes"] == 3
    assert after["aenv_host_memory_available_bytes"] > 0
    assert after["process_resident_memory_bytes"] > 0


async def test_answers_are_counted_by_route_whatever_clients_think_up(watched: Watched) -> None:
    client, key = watched.client, {"X-API-KEY": KEY}
    await client.post("/v2/sandboxes", json={"templateID": "base"}, headers=key)
    for name in ("i1", "i2"):
        await client.get(f"/sandboxes/{name}", headers=key)
        await client.get(f"/{name}", headers=key)
        await client.request(name.upper(), f"/sandboxes/{name}", headers=key)
    await client.get("/v2/sandboxes")
    seen = await watched.scrape()
    prefix = "aenv_api_requests_total"
    assert seen[f"{prefix} method=POST route=/v2/sandboxes status=201"] == 1
    assert seen[f"{prefix} method=GET route=/sandboxes/{{sandbox_id}} status=404"] == 2
    assert seen[f"{prefix} method=GET route=unmatched status=404"] == 2
    assert seen[f"{prefix} method=GET route=unmatched status=401"] == 1
    assert not any("i1" in name or "I1" in name for name in seen)
    assert seen["aenv_api_request_seconds_count route=/v2/sandboxes"] == 1


async def test_single_sandboxes_take_the_key(watched: Watched) -> None:
    sandbox = (await watched.node.service.create(wanted())).sandbox
    [machine] = watched.node.hypervisor.machines.values()
    own = await asyncio.create_subprocess_exec("sleep", "60")
    machine.pid = own.pid
    try:
        assert (await watched.client.get("/metrics/sandboxes")).status_code == 401
        seen = await watched.scrape("/metrics/sandboxes", **{"X-API-KEY": KEY})
        assert seen[f"aenv_sandbox_memory_resident_bytes sandbox={sandbox.id}"] > 0
        assert seen[f"aenv_sandbox_vcpus sandbox={sandbox.id}"] == 1
        assert seen[f"aenv_sandbox_cpu_seconds_total sandbox={sandbox.id}"] >= 0
        assert sandbox.id not in (await watched.client.get("/metrics")).text
    finally:
        own.kill()
        await own.wait()


async def test_requests_have_an_id_given_or_made(watched: Watched) -> None:
    given = await watched.client.get("/health", headers={"X-Request-Id": "client-17"})
    assert given.headers["X-Request-Id"] == "client-17"
    made = {(await watched.client.get("/none")).headers["X-Request-Id"] for _ in range(3)}
    assert len(made) == 3
    for bad in ("x" * 129, 'a"b', "a b", ""):
        answer = await watched.client.get("/health", headers={"X-Request-Id": bad})
        assert answer.headers["X-Request-Id"] != bad


async def test_the_document_names_all_metrics_and_no_others(watched: Watched) -> None:
    sandbox = (await watched.node.service.create(wanted())).sandbox
    await watched.node.service.kill(sandbox.id)
    one = (await watched.client.get("/metrics")).text
    many = (await watched.client.get("/metrics/sandboxes", headers={"X-API-KEY": KEY})).text
    served = set(re.findall(r"^# TYPE (aenv_\w+)", one + many, re.MULTILINE))
    rows = re.findall(r"^\| `(aenv_\w+)`(?:[^|]*)\| (\w+) \|", DOCUMENT.read_text(), re.MULTILINE)
    optional = {"aenv_builds_under_way", "aenv_images_total", "aenv_images_converting"}
    assert {name for name, _ in rows} - optional == served - optional
    kinds = dict(re.findall(r"^# TYPE (aenv_\w+) (\w+)", one + many, re.MULTILINE))
    assert all(kinds.get(name, kind) == kind for name, kind in rows)
