"""Events over HTTP: a stream behind the node's own front, and E2B's lists."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentenv.api import events as events_api
from agentenv.api.app import create_app
from agentenv.node import uvicorn_config
from agentenv.observe.events import PENDING_MOST
from agentenv.observe.observation import Observation
from agentenv.proxy.front import front_protocol
from agentenv.sandbox.observing import Change, Happening
from support.front_node import QuietServer
from support.sandbox_parts import MemoryNode, quiet, wanted

KEY = "e2b_0123456789abcdef"


@dataclass
class Served:
    """A node in memory whose API is served for real."""

    node: MemoryNode
    observation: Observation
    client: httpx.AsyncClient


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    node = MemoryNode(tmp_path)
    await node.service.start()
    await node.prepare()
    observation = Observation(node.service)
    app = create_app(
        node.service,
        node.templates,
        node.settings,
        keys=node.keys(KEY),
        port=0,
        observation=observation,
    )
    front = front_protocol(node.service, node.settings)
    config = uvicorn_config(app, front)
    config.host, config.port = "127.0.0.1", 0
    server = QuietServer(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.001)  # uvicorn has no event for it
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, headers={"X-API-KEY": KEY}, trust_env=False) as client:
        yield Served(node, observation, client)
        observation.events.close()
    server.should_exit = True
    await serving
    front.plane.close()
    await node.service.stop()


async def blocks(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Events as a client sees them; comments are left out."""
    fields: dict[str, Any] = {}
    async for line in answer.aiter_lines():
        name, _, value = line.partition(": ")
        if not line and fields:
            yield {**fields, "data": json.loads(fields["data"])}
            fields = {}
        elif name:
            fields[name] = value


async def test_a_life_as_a_stream(served: Served) -> None:
    service = served.node.service
    async with served.client.stream("GET", "/events") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        stream = blocks(answer)
        sandbox = (await service.create(wanted(metadata={"job": "a"}))).sandbox
        first = await anext(stream)
        await service.pause(sandbox.id)
        await quiet()
        await service.connect(sandbox.id, 60)
        taken, _ = await service.checkpoint(sandbox.id)
        await service.kill(sandbox.id)
        rest = [await anext(stream) for _ in range(4)]
    assert first["event"] == "created"
    assert first["data"] == {
        "id": first["id"],
        "timestamp": first["data"]["timestamp"],
        "about": "sandbox",
        "kind": "created",
        "sandboxID": sandbox.id,
        "templateID": "tbase",
        "buildID": sandbox.template.build_id,
        "state": "running",
        "metadata": {"job": "a"},
        "detail": {},
    }
    assert [each["event"] for each in rest] == ["paused", "resumed", "checkpointed", "killed"]
    assert rest[2]["data"]["detail"]["snapshot"] == taken.id
    assert rest[3]["data"]["detail"] == {"reason": "killed"}
    assert rest[3]["data"]["state"] == "killed"


async def test_a_stream_goes_on_where_it_ended(served: Served) -> None:
    service = served.node.service
    one = (await service.create(wanted())).sandbox
    other = (await service.create(wanted())).sandbox
    await service.kill(other.id)
    created = next(each for each in served.observation.events.newest_first() if each.sandbox_id == one.id)
    headers = {"Last-Event-ID": created.id}
    query = f"sandbox_id={one.id},{other.id}&kind=killed&kind=expired"
    async with served.client.stream("GET", f"/events?{query}", headers=headers) as answer:
        event = await anext(blocks(answer))
    assert (event["event"], event["data"]["sandboxID"]) == ("killed", other.id)
    async with served.client.stream("GET", "/events?after=00000000-3") as answer:
        stream = blocks(answer)
        assert [(await anext(stream))["event"] for _ in range(2)] == ["lost", "created"]


async def test_what_is_wrong_is_said(served: Served) -> None:
    answer = await served.client.get("/events?kind=bored")
    assert answer.status_code == 400
    assert "bored" in answer.json()["message"]
    assert (await served.client.get("/events", headers={"X-API-KEY": "other"})).status_code == 401
    assert (await served.client.get("/events/sandboxes?limit=101")).status_code == 400


async def test_who_does_not_read_is_cut_off(served: Served) -> None:
    """Its connection ends without the end of the body, and it costs the node a bounded piece of memory."""
    events, host = served.observation.events, served.client.base_url
    sandbox = (await served.node.service.create(wanted(metadata={"much": "x" * 100_000}))).sandbox
    reader, writer = await asyncio.open_connection(host.host, host.port, limit=1024)
    writer.write(f"GET /events HTTP/1.1\r\nHost: a\r\nX-API-KEY: {KEY}\r\n\r\n".encode())
    await reader.readuntil(b"following")
    rounds = 0
    while events.following and rounds < 10_000:
        events.happened(Happening(Change.UPDATED, sandbox, 1.0))
        rounds += 1
        await asyncio.sleep(0)
    assert PENDING_MOST < rounds < 10_000
    end = b""
    while part := await reader.read(1 << 20):
        end = (end + part)[-5:]
    assert end != b"0\r\n\r\n"
    writer.close()


async def test_the_end_of_the_node_ends_streams_in_order(served: Served) -> None:
    async with served.client.stream("GET", "/events") as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == ": following"
        served.observation.events.close()
        assert [line async for line in lines] == [""]
    assert served.observation.events.following == 0


async def test_who_goes_away_is_forgotten(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is seen when something is written, as a client may close its half and read on."""
    monkeypatch.setattr(events_api, "KEEP_ALIVE_S", 0.02)
    async with served.client.stream("GET", "/events"):
        assert served.observation.events.following == 1
    while served.observation.events.following:
        await asyncio.sleep(0.001)  # the server sees the end of a connection by and by


async def test_the_lists_of_e2b(served: Served) -> None:
    service, client = served.node.service, served.client
    sandbox = (await service.create(wanted(metadata={"job": "a"}))).sandbox
    other = (await service.create(wanted())).sandbox
    await service.set_timeout(sandbox.id, 100)
    await service.kill(sandbox.id)
    [killed, updated, created] = (await client.get(f"/events/sandboxes/{sandbox.id}")).json()
    assert [each["type"].rpartition(".")[2] for each in (killed, updated, created)] == [
        "killed",
        "updated",
        "created",
    ]
    assert created == {
        "version": "v2",
        "id": created["id"],
        "type": "sandbox.lifecycle.created",
        "eventData": {"sandbox_metadata": {"job": "a"}},
        "sandboxBuildId": sandbox.template.build_id,
        "sandboxExecutionId": sandbox.id,
        "sandboxId": sandbox.id,
        "sandboxTeamId": "",
        "sandboxTemplateId": "tbase",
        "timestamp": created["timestamp"],
    }
    of_all = (await client.get("/events/sandboxes?orderAsc=true&limit=2")).json()
    assert [each["sandboxId"] for each in of_all] == [sandbox.id, other.id]
    query = "types=sandbox.lifecycle.killed&types=sandbox.lifecycle.paused"
    assert (await client.get(f"/events/sandboxes?{query}")).json() == [killed]
    assert (await client.get("/events/sandboxes?offset=3")).json() == [created]
