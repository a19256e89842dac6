"""The sandbox routes over HTTP, with parts in memory behind them."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.parse
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentenv.api.app import create_app
from agentenv.errors import HostFault
from support.sandbox_parts import MemoryNode, quiet, wanted

KEY = "e2b_0123456789abcdef"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[MemoryNode]:
    node = MemoryNode(tmp_path, max_sandboxes=20)
    node.slots.capacity = 20
    await node.service.start()
    await node.prepare()
    yield node
    await node.service.stop()


@pytest.fixture
async def client(node: MemoryNode) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(node.service, node.templates, node.settings, keys=node.keys(KEY), port=8000)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"X-API-KEY": KEY}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:8000", headers=headers
    ) as client:
        yield client


async def create(client: httpx.AsyncClient, path: str = "/v2/sandboxes", **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json={"templateID": "base", **body})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def assert_fault(answer: httpx.Response, status: int, words: str = "") -> None:
    """The documented status, and E2B's error body with the same code."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) - {"error_code", "remedy"} == {"code", "message"}
    assert body["code"] == status
    assert isinstance(body["message"], str) and words in body["message"]
    assert answer.headers["should-retry"] in ("true", "false")
    assert "Traceback" not in answer.text


# Create


async def test_create_v2(client: httpx.AsyncClient, node: MemoryNode) -> None:
    answer = await client.post("/v2/sandboxes", json={"templateID": "base", "metadata": {}, "envVars": {}})
    assert answer.status_code == 201
    body = answer.json()
    sandbox = node.service.get(body["sandboxID"])
    assert body == {
        "templateID": "tbase",
        "sandboxID": sandbox.id,
        "clientID": "agentenv",
        "envdVersion": "0.6.13",
        "alias": "base",
        "envdAccessToken": sandbox.access_token,
        "domain": "localhost:8000",
    }
    assert sandbox.end_at - sandbox.started_at == 300
    assert re.fullmatch(
        r"slot;dur=[\d.]+, restore;dur=[\d.]+, run;dur=[\d.]+, agent;dur=[\d.]+, total;dur=[\d.]+",
        answer.headers["server-timing"],
    )


async def test_create_v1_as_the_cli_does(client: httpx.AsyncClient, node: MemoryNode) -> None:
    body = await create(client, "/sandboxes", timeout=300, secure=True, allow_internet_access=True)
    assert body["envdAccessToken"]
    unsecured = await create(client, "/sandboxes")
    assert "envdAccessToken" not in unsecured
    sandbox = node.service.get(unsecured["sandboxID"])
    assert sandbox.end_at - sandbox.started_at == 15


async def test_nulls_unknown_fields_and_defaults_pass(client: httpx.AsyncClient) -> None:
    await create(
        client,
        autoPause=False,
        autoResume={"enabled": False},
        allow_internet_access=None,
        network={"allowOut": [], "egressProxy": None, "allowPublicTraffic": None, "later": 1},
        metadata=None,
        envVars=None,
        mcp=None,
        iam={},
        volumeMounts=[],
        customExtensionParams={"x": 1},
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"templateID": "base", "timeout": -1}, "timeout"),
        ({"templateID": "base", "timeout": 0}, "timeout"),
        ({"templateID": "base", "timeout": 10**9}, "limit"),
        ({"templateID": "base", "timeout": 10**30}, "limit"),
        ({"templateID": "base", "timeout": "300"}, "timeout"),
        ({"templateID": "base", "timeout": True}, "timeout"),
        ({"templateID": "base", "timeout": 1.5}, "timeout"),
        ({"templateID": 7}, "templateID"),
        ({"templateID": ""}, "templateID"),
        ({}, "templateID"),
        ([], "body"),
        ("text", "body"),
        (None, "body"),
        ({"templateID": "base", "metadata": {"a": 1}}, "metadata.a"),
        ({"templateID": "base", "metadata": "a"}, "metadata"),
        ({"templateID": "base", "envVars": {"": "x"}}, "envVars"),
        ({"templateID": "base", "envVars": {"A=B": "x"}}, "envVars"),
        ({"templateID": "base", "envVars": {"A": "\0"}}, "envVars"),
        ({"templateID": "base", "metadata": {"\ud800": "x"}}, ""),
        ({"templateID": "base", "metadata": {"x": "\ud800"}}, ""),
        ({"templateID": "base", "autoResume": True}, "autoResume"),
        ({"templateID": "base", "network": []}, "network"),
        ({"templateID": "base", "network": {"allowOut": "1.1.1.1"}}, "network.allowOut"),
        ({"templateID": "base", "network": {"maskRequestHost": "a\r\nX: y"}}, "network.maskRequestHost"),
        ({"templateID": "base", "network": {"allowOut": ["example.com"]}}, "network.allowOut"),
    ],
)
@pytest.mark.parametrize("path", ["/sandboxes", "/v2/sandboxes"])
async def test_bad_values_are_400(
    client: httpx.AsyncClient, node: MemoryNode, path: str, body: Any, words: str
) -> None:
    answer = await client.post(path, content=json.dumps(body))
    assert_fault(answer, 400, words)
    node.assert_empty()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"nope", b"\xff\xfe", b"[" * 100_000, b'{"templateID": "base"', b"NaN"]
)
async def test_what_is_no_json_is_400(client: httpx.AsyncClient, content: bytes) -> None:
    assert_fault(await client.post("/v2/sandboxes", content=content), 400)


async def test_the_content_type_does_not_matter(client: httpx.AsyncClient) -> None:
    for kind in ({}, {"content-type": "application/x-www-form-urlencoded"}, {"content-type": "text/plain"}):
        answer = await client.post("/v2/sandboxes", content=b'{"templateID": "base"}', headers=kind)
        assert answer.status_code == 201


@pytest.mark.parametrize(
    "body",
    [
        {"network": {"httpsPorts": [8443]}},
        {"network": {"rules": {"x.com": [{"transform": {}}]}}},
        {"network": {"egressProxy": {"address": "1.1.1.1:1080"}}},
        {"mcp": {"x": {}}},
        {"iam": {"tokens": {"a": {"audience": "b", "tokenType": "JWT-SVID"}}}},
        {"volumeMounts": [{"name": "v", "path": "/v"}]},
    ],
)
async def test_what_is_not_there_yet_is_501(client: httpx.AsyncClient, node: MemoryNode, body: Any) -> None:
    answer = await client.post("/v2/sandboxes", json={"templateID": "base", **body})
    assert_fault(answer, 501, "not part of this version")
    assert answer.headers["should-retry"] == "false"
    node.assert_empty()


async def test_an_unknown_template_is_404(client: httpx.AsyncClient) -> None:
    assert_fault(await client.post("/v2/sandboxes", json={"templateID": "nope"}), 404, "nope")


async def test_a_full_node_says_when_to_try_again(client: httpx.AsyncClient, node: MemoryNode) -> None:
    for _ in range(20):
        await create(client)
    answer = await client.post("/v2/sandboxes", json={"templateID": "base"})
    assert_fault(answer, 503, "20 of 20 sandboxes")
    assert (answer.headers["should-retry"], answer.headers["retry-after"]) == ("true", "5")


async def test_a_failing_host_is_not_to_be_tried_again(client: httpx.AsyncClient, node: MemoryNode) -> None:
    node.steps.fail("restore", HostFault("no qemu"))
    answer = await client.post("/v2/sandboxes", json={"templateID": "base"})
    assert_fault(answer, 500, "no qemu")
    assert answer.headers["should-retry"] == "false"


async def test_an_unforeseen_error_shows_nothing(client: httpx.AsyncClient, node: MemoryNode) -> None:
    node.steps.fail("restore", ZeroDivisionError("secret"))
    answer = await client.post("/v2/sandboxes", json={"templateID": "base"})
    assert_fault(answer, 500)
    assert "secret" not in answer.text
    node.assert_empty()


async def test_idempotency_keys(client: httpx.AsyncClient) -> None:
    async def call(key: str, **body: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key}
        return await client.post("/v2/sandboxes", json={"templateID": "base", **body}, headers=headers)

    first, second = await asyncio.gather(call("a-1"), call("a-1"))
    assert first.json() == second.json()
    assert first.status_code == second.status_code == 201
    assert_fault(await call("a-1", timeout=99), 422, "another request")
    assert (await call("a-2")).json() != first.json()
    for bad in ("A", "x" * 256, "a_b", "a b", ""):
        assert_fault(await call(bad), 400, "Idempotency-Key")


# Look


async def test_the_host_that_services_are_told(client: httpx.AsyncClient, node: MemoryNode) -> None:
    network = {"maskRequestHost": "localhost:${PORT}"}
    made = await create(client, network=network)
    detail = (await client.get(f"/sandboxes/{made['sandboxID']}")).json()
    assert detail["network"] == network
    route = node.service.route(made["sandboxID"])
    assert route is not None and route.mask_host == "localhost:${PORT}"
    (fork,) = (await client.post(f"/sandboxes/{made['sandboxID']}/fork", json={"count": 1})).json()
    route = node.service.route(fork["sandbox"]["sandboxID"])
    assert route is not None and route.mask_host == "localhost:${PORT}"


async def test_get_has_all_that_the_sdk_needs_and_no_null(client: httpx.AsyncClient) -> None:
    from e2b.api.client.models import SandboxDetail

    made = await create(client, metadata={"k": "v"}, timeout=60, network={"allowPublicTraffic": False})
    answer = await client.get(f"/sandboxes/{made['sandboxID']}")
    assert answer.status_code == 200
    body = answer.json()
    assert None not in body.values()
    detail = SandboxDetail.from_dict(body)
    assert (detail.template_id, detail.alias, detail.state) == ("tbase", "base", "running")
    assert (detail.cpu_count, detail.memory_mb, detail.disk_size_mb) == (1, 512, 2048)
    assert (detail.end_at - detail.started_at).total_seconds() == 60
    assert detail.started_at.tzinfo is not None
    assert body["startedAt"].endswith("Z")
    assert body["metadata"] == {"k": "v"}
    assert body["network"] == {"allowPublicTraffic": False}
    assert body["lifecycle"] == {"onTimeout": "pause", "autoResume": False}
    assert body["envdAccessToken"] == made["envdAccessToken"]
    assert made["trafficAccessToken"]
    plain = (await client.get(f"/sandboxes/{(await create(client))['sandboxID']}")).json()
    assert not {"network", "allowInternetAccess"} & set(plain)


async def test_limits_are_taken_shown_and_replaced(client: httpx.AsyncClient) -> None:
    limits = {"network": {"rxBytesPerSecond": 1 << 20}, "disk": {"iops": 100, "burstOperations": 200}}
    path = f"/sandboxes/{(await create(client, limits=limits))['sandboxID']}"
    assert (await client.get(path)).json()["limits"] == limits
    assert (await client.put(f"{path}/limits", json={"disk": {"iops": 50}})).status_code == 204
    assert (await client.get(path)).json()["limits"] == {"disk": {"iops": 50}}
    assert (await client.put(f"{path}/limits", json={})).status_code == 204
    assert "limits" not in (await client.get(path)).json()


@pytest.mark.parametrize(
    "limits",
    [
        {"network": {"rxBytesPerSecond": 5}},
        {"network": {"rxBytesPerSecond": -1}},
        {"network": {"rxBytesPerSecond": "1M"}},
        {"network": {"rxBytesPerSecond": 1.5}},
        {"network": {"bytesPerSecond": 1 << 20}},
        {"disk": {"burstBytes": 1 << 30}},
        {"memory": {}},
        [],
    ],
)
async def test_limits_that_cannot_be(client: httpx.AsyncClient, limits: Any) -> None:
    refused = await client.post("/v2/sandboxes", json={"templateID": "base", "limits": limits})
    assert_fault(refused, 400, "limits")
    path = f"/sandboxes/{(await create(client))['sandboxID']}/limits"
    assert_fault(await client.put(path, json=limits), 400)


@pytest.mark.parametrize(
    "name", ["ix", "x" * 5000, "%00", "a%2Fb", "..%2F..", "%F0%9F%92%A9", "%ff", "a;b'\""]
)
async def test_unknown_ids_are_404_everywhere(client: httpx.AsyncClient, name: str) -> None:
    for method, path, body in [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/timeout", {"timeout": 10}),
        ("POST", "/refreshes", {"duration": 10}),
        ("POST", "/connect", {"timeout": 10}),
        ("POST", "/pause", None),
        ("PUT", "/limits", {}),
    ]:
        assert_fault(await client.request(method, f"/sandboxes/{name}{path}", json=body), 404)


async def test_the_words_for_an_unknown_sandbox(client: httpx.AsyncClient) -> None:
    answer = await client.get("/sandboxes/ix")
    assert answer.json()["message"] == "Sandbox \"ix\" doesn't exist or you don't have access to it"


async def test_list_v2_pages_through_all(client: httpx.AsyncClient, node: MemoryNode) -> None:
    ids = []
    for _ in range(5):
        node.clock.jump(1)
        ids.append((await create(client))["sandboxID"])
    seen: list[str] = []
    token = ""
    while True:
        answer = await client.get("/v2/sandboxes", params={"limit": 2, "nextToken": token})
        assert answer.headers["x-total-running"] == "5"
        seen += [each["sandboxID"] for each in answer.json()]
        token = answer.headers.get("x-next-token", "")
        if not token:
            break
    assert seen == ids[::-1]
    oldest = await client.get("/v2/sandboxes", params={"order": "asc", "limit": 1})
    assert [each["sandboxID"] for each in oldest.json()] == ids[:1]


async def test_list_filters(client: httpx.AsyncClient, node: MemoryNode) -> None:
    one = (await create(client, metadata={"a b": "c&d", "x": "1"}))["sandboxID"]
    node.clock.jump(10)
    two = (await create(client, metadata={"x": "2"}))["sandboxID"]

    async def ids(path: str = "/v2/sandboxes", **query: Any) -> list[str]:
        answer = await client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return [each["sandboxID"] for each in answer.json()]

    quoted = urllib.parse.urlencode({urllib.parse.quote("a b"): urllib.parse.quote("c&d")})
    for path in ("/sandboxes", "/v2/sandboxes"):
        assert await ids(path, metadata=quoted) == [one]
        assert await ids(path, metadata="x=2") == [two]
        assert await ids(path, metadata="x=3") == []
        assert await ids(path) == [two, one]
    assert await ids(state="running,paused") == await ids(state="running") == [two, one]
    assert await ids(state=["paused", "running"]) == [two, one]
    assert await ids(state="paused") == []
    assert await ids(template="base") == await ids(template="tbase") == [two, one]
    assert await ids(template="nope") == []
    first = datetime.fromtimestamp(node.service.get(one).started_at).astimezone()
    assert await ids(startedAfter=first.isoformat()) == [two, one]
    second = datetime.fromtimestamp(node.service.get(two).started_at).astimezone()
    assert await ids(startedAfter=second.isoformat()) == [two]
    item = (await client.get("/v2/sandboxes")).json()[0]
    assert None not in item.values()
    assert (item["alias"], item["state"], item["metadata"]) == ("base", "running", {"x": "2"})


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=101",
        "limit=x",
        "limit=-1",
        "state=killed",
        "order=up",
        "nextToken=%21%21",
        "startedAfter=yesterday",
        "startedAfter=2020-13-01T00:00:00Z",
    ],
)
async def test_bad_queries_are_400(client: httpx.AsyncClient, query: str) -> None:
    assert_fault(await client.get(f"/v2/sandboxes?{query}"), 400)


# Live


async def test_kill(client: httpx.AsyncClient, node: MemoryNode) -> None:
    name = (await create(client))["sandboxID"]
    answer = await client.delete(f"/sandboxes/{name}")
    assert (answer.status_code, answer.content) == (204, b"")
    assert "release;dur=" in answer.headers["server-timing"]
    assert_fault(await client.delete(f"/sandboxes/{name}"), 404)
    node.assert_empty()


async def test_network_rules(client: httpx.AsyncClient, node: MemoryNode) -> None:
    sandbox = (await create(client, network={"allowPublicTraffic": True, "denyOut": ["8.8.8.8"]}))[
        "sandboxID"
    ]
    path = f"/sandboxes/{sandbox}"
    rules = {"allowOut": ["1.1.1.1", "example.com"], "denyOut": ["0.0.0.0/0"]}
    kept = {"allowPublicTraffic": True}
    answer = await client.put(f"{path}/network", json=rules)
    assert (answer.status_code, answer.content) == (204, b"")
    assert (await client.get(path)).json()["network"] == {**kept, **rules}
    record = node.service.get(sandbox)
    assert record.slot is not None
    assert node.slots.policies[record.slot].allow_names == ("example.com",)
    assert_fault(await client.put(f"{path}/network", json={"denyOut": ["example.com"]}), 400, "denyOut")
    assert_fault(await client.put(f"{path}/network", json={"rules": {"a.com": [{}]}}), 501, "rules")
    assert (await client.get(path)).json()["network"] == {**kept, **rules}
    assert (await client.put(f"{path}/network", json={"allow_internet_access": False})).status_code == 204
    shown = (await client.get(path)).json()
    assert (shown["allowInternetAccess"], shown["network"]) == (False, kept)
    assert (await client.put(f"{path}/network", json={})).status_code == 204
    assert "allowInternetAccess" not in (await client.get(path)).json()
    assert_fault(await client.put("/sandboxes/nosuch/network", json={}), 404)


@pytest.mark.parametrize("prefix", ["", "/v2"])
async def test_connect(client: httpx.AsyncClient, node: MemoryNode, prefix: str) -> None:
    made = await create(client, timeout=100)
    path = f"{prefix}/sandboxes/{made['sandboxID']}/connect"
    for body, left in [
        ({"timeout": 10}, 100),
        ({"timeout": 200, "memory": True}, 200),
        ({}, 300),
        (None, 300),
    ]:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200
        assert answer.json() == made
        assert node.service.get(made["sandboxID"]).end_at == node.clock.now() + left
    for bad in ({"timeout": -1}, {"timeout": "1"}, {"timeout": 10**9}, {"memory": 1}):
        assert_fault(await client.post(path, json=bad), 400)


async def test_timeout_and_refreshes(client: httpx.AsyncClient, node: MemoryNode) -> None:
    name = (await create(client, timeout=100, autoPause=False))["sandboxID"]

    async def post(what: str, body: Any) -> httpx.Response:
        return await client.post(f"/sandboxes/{name}/{what}", json=body)

    def left() -> float:
        return node.service.get(name).end_at - node.clock.now()

    answer = await post("timeout", {"timeout": 50})
    assert (answer.status_code, answer.content, left()) == (204, b"", 50)
    assert ((await post("refreshes", {"duration": 20})).status_code, left()) == (204, 50)
    assert ((await post("refreshes", {"duration": 70})).status_code, left()) == (204, 70)
    assert ((await post("refreshes", None)).status_code, left()) == (204, 70)
    for what, bad in [
        ("timeout", {}),
        ("timeout", None),
        ("timeout", {"timeout": "1"}),
        ("timeout", {"timeout": 10**9}),
        ("refreshes", {"duration": 3601}),
        ("refreshes", {"duration": -1}),
    ]:
        assert_fault(await post(what, bad), 400)
    assert (await post("timeout", {"timeout": -10})).status_code == 204
    assert_fault(await client.get(f"/sandboxes/{name}"), 404, "time-to-live")
    await quiet()
    node.assert_empty()


@pytest.mark.parametrize("body", [None, {}, {"memory": False}, {"requireHealthyGuest": True}])
async def test_pause_and_connect(client: httpx.AsyncClient, node: MemoryNode, body: Any) -> None:
    made = await create(client)
    path = f"/sandboxes/{made['sandboxID']}"
    assert (await client.post(f"{path}/pause", json=body)).status_code == 204
    shown = (await client.get(path)).json()
    assert shown["state"] == "paused"
    assert shown["pauseMode"] == ("filesystem" if body and body.get("memory") is False else "full")
    assert_fault(await client.post(f"{path}/pause", json=body), 409, "already paused")
    assert node.hypervisor.machines == {}
    connected = await client.post(f"/v2{path}/connect", json={"timeout": 50})
    assert connected.status_code == 201
    assert connected.json()["envdAccessToken"] == made["envdAccessToken"]
    assert (await client.post(f"{path}/connect", json={"timeout": 50})).status_code == 200
    shown = (await client.get(path)).json()
    assert shown["state"] == "running"
    assert "pauseMode" not in shown


async def test_the_oldest_resume(client: httpx.AsyncClient) -> None:
    path = f"/sandboxes/{(await create(client))['sandboxID']}"
    assert_fault(await client.post(f"{path}/resume", json={"timeout": 50}), 409, "already running")
    await client.post(f"{path}/pause")
    assert (await client.post(f"{path}/resume", json={"timeout": 50})).status_code == 201


async def test_an_agent_that_does_not_answer_is_told_apart(
    client: httpx.AsyncClient, node: MemoryNode
) -> None:
    path = f"/sandboxes/{(await create(client))['sandboxID']}"
    node.steps.fail("health", OSError("no route"))
    answer = await client.post(f"{path}/pause", json={"requireHealthyGuest": True})
    assert_fault(answer, 503, "runs on")
    assert answer.json()["error_code"] == "sandbox_snapshot_guest_agent_unresponsive"
    assert (await client.get(path)).json()["state"] == "running"


async def test_it_goes_on_when_its_request_is_gone(client: httpx.AsyncClient, node: MemoryNode) -> None:
    node.steps.hold("agent")
    call = asyncio.create_task(client.post("/v2/sandboxes", json={"templateID": "base"}))
    await node.steps.reached("agent")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    node.steps.let_go("agent")
    await quiet()
    assert len((await client.get("/sandboxes")).json()) == 1


async def test_the_service_and_the_api_agree(node: MemoryNode, client: httpx.AsyncClient) -> None:
    sandbox = (await node.service.create(wanted())).sandbox
    assert (await client.get(f"/sandboxes/{sandbox.id}")).json()["sandboxID"] == sandbox.id


async def test_what_operations_spent_their_time_on_is_told(client: httpx.AsyncClient) -> None:
    name = (await client.post("/v2/sandboxes", json={"templateID": "base"})).json()["sandboxID"]
    await client.post(f"/sandboxes/{name}/pause")
    made, paused = (await client.get(f"/sandboxes/{name}/operations")).json()
    assert (made["operation"], paused["operation"]) == ("create", "pause")
    assert "restore" in [phase["name"] for phase in made["phases"]]
    assert set(made["phases"][0]) == {"name", "begunSeconds", "seconds", "failed"}
    await client.delete(f"/sandboxes/{name}")
    ended = (await client.get(f"/sandboxes/{name}/operations")).json()
    assert [each["operation"] for each in ended] == ["create", "pause", "kill"]
    assert (await client.get("/sandboxes/ix/operations")).status_code == 404
