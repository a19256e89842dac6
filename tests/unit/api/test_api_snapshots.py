"""The routes of snapshots over HTTP: statuses, fields and headers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentenv.api.app import create_app
from support.sandbox_parts import MemoryNode

KEY = "e2b_0123456789abcdef"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[MemoryNode]:
    node = MemoryNode(tmp_path, max_sandboxes=20)
    node.slots.capacity = 20
    await node.service.start()
    yield node
    await node.service.stop()


@pytest.fixture
async def client(node: MemoryNode) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(node.service, node.templates, node.settings, keys=node.keys(KEY), port=8000)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:8000", headers={"X-API-KEY": KEY}
    ) as client:
        yield client


async def create(client: httpx.AsyncClient, **body: Any) -> str:
    answer = await client.post("/v2/sandboxes", json={"templateID": "base", **body})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["sandboxID"])


async def take(client: httpx.AsyncClient, sandbox_id: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(f"/sandboxes/{sandbox_id}/snapshots", json=body)
    assert answer.status_code == 201, answer.text
    assert "capture;dur=" in answer.headers["server-timing"]
    return dict(answer.json())


async def test_a_snapshot_is_taken_listed_started_from_and_deleted(client: httpx.AsyncClient) -> None:
    name = await create(client)
    one, two = await take(client, name), await take(client, name, name="team/mine:v1")
    assert one == {"snapshotID": one["snapshotID"], "names": []}
    assert two["names"] == ["team/mine:v1"]
    listed = (await client.get("/snapshots", params={"sandboxID": name})).json()
    assert listed == [two, one] or listed == [one, two]  # taken in the same moment of the test's clock
    assert (await client.get("/snapshots", params={"name": "team/mine"})).json() == [two]
    assert (await client.get("/snapshots", params={"sandboxID": "other"})).json() == []
    page = await client.get("/snapshots", params={"limit": 1})
    rest = await client.get("/snapshots", params={"limit": 1, "nextToken": page.headers["x-next-token"]})
    assert {page.json()[0]["snapshotID"], rest.json()[0]["snapshotID"]} == {
        one["snapshotID"],
        two["snapshotID"],
    }
    assert "x-next-token" not in rest.headers
    await create(client, templateID="team/mine:v1")
    for reference in ("team%2Fmine%3Av1", one["snapshotID"]):
        assert (await client.delete(f"/templates/{reference}")).status_code == 204
        assert (await client.delete(f"/templates/{reference}")).status_code == 404
    assert (await client.get("/snapshots")).json() == []


async def test_relatives(client: httpx.AsyncClient) -> None:
    name = await create(client)
    one, two = await take(client, name), await take(client, name)
    found = (await client.get(f"/snapshots/{one['snapshotID']}")).json()
    assert (found["children"], found["sandboxID"], found["mode"]) == ([two["snapshotID"]], name, "full")
    assert (await client.get(f"/snapshots/{two['snapshotID']}")).json()["parent"] == one["snapshotID"]
    assert (await client.get("/snapshots/nope")).status_code == 404
    tree = (await client.get(f"/sandboxes/{name}/tree")).json()
    [root] = tree["branches"]
    assert root["snapshotID"] == one["snapshotID"]
    assert [each["snapshotID"] for each in root["branches"]] == [two["snapshotID"]]
    assert tree["snapshotID"] == two["snapshotID"]
    assert tree["startID"] == found["parent"]


async def test_memory_is_given_back(client: httpx.AsyncClient) -> None:
    name = await create(client)
    answer = await client.post(f"/sandboxes/{name}/refresh-memory")
    assert answer.status_code == 204
    assert "restore;" in answer.headers["server-timing"]
    await client.post(f"/sandboxes/{name}/pause")
    assert (await client.post(f"/sandboxes/{name}/refresh-memory")).status_code == 409
    assert (await client.post("/sandboxes/ix/refresh-memory")).status_code == 404


async def test_rollback(client: httpx.AsyncClient) -> None:
    name = await create(client)
    snapshot = (await take(client, name))["snapshotID"]
    back = await client.post(f"/sandboxes/{name}/rollback", json={"snapshotID": snapshot})
    assert (back.status_code, back.json()["sandboxID"]) == (200, name)
    assert (await client.post(f"/sandboxes/{name}/rollback")).status_code == 200
    assert (await client.post(f"/sandboxes/{name}/rollback", json={"snapshotID": "x"})).status_code == 404
    assert (await client.post("/sandboxes/ix/rollback")).status_code == 404


async def test_fork_and_batch(client: httpx.AsyncClient, node: MemoryNode) -> None:
    name = await create(client)
    node.slots.capacity = 3
    answer = await client.post(f"/sandboxes/{name}/fork", json={"count": 3, "timeout": 50})
    assert answer.status_code == 201
    kinds = [next(iter(each)) for each in answer.json()]
    assert sorted(kinds) == ["error", "sandbox", "sandbox"]
    error = next(each["error"] for each in answer.json() if "error" in each)
    assert (error["code"], set(error)) == (503, {"code", "message"})
    made = next(each["sandbox"] for each in answer.json() if "sandbox" in each)
    assert {"templateID", "sandboxID", "clientID", "envdVersion", "envdAccessToken"} <= set(made)
    node.slots.capacity = 20
    children = [{"metadata": {"n": "0"}}, {"metadata": {"n": "1"}, "envVars": {"A": "1"}}]
    answer = await client.post("/sandboxes/batch", json={"templateID": "base", "children": children})
    assert [next(iter(each)) for each in answer.json()] == ["sandbox", "sandbox"]
    found = await client.get("/v2/sandboxes", params={"metadata": "n%3D1"})
    assert [each["sandboxID"] for each in found.json()] == [answer.json()[1]["sandbox"]["sandboxID"]]
    for path, bad in [
        (f"/sandboxes/{name}/fork", {"count": 0}),
        (f"/sandboxes/{name}/fork", {"count": 101}),
        (f"/sandboxes/{name}/fork", {"timeout": 0}),
        ("/sandboxes/batch", {"count": 1}),
        ("/sandboxes/batch", {"templateID": "base", "count": 1, "children": children}),
    ]:
        assert (await client.post(path, json=bad)).status_code == 400
    assert (await client.post("/sandboxes/ix/fork")).status_code == 404


async def test_a_template_goes_with_its_first_snapshot(client: httpx.AsyncClient, node: MemoryNode) -> None:
    name = await create(client)
    await client.delete(f"/sandboxes/{name}")
    assert len(node.service.snapshots.of_kinds(("template",))) == 1
    assert (await client.delete("/templates/base")).status_code == 204
    assert node.service.snapshots.of_kinds(("template",)) == ()
    assert (await client.delete("/templates/base")).status_code == 404
