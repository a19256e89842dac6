"""Two projects on one node: neither sees, names, starts from, changes or infers what is the other's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentenv.api.app import create_app
from agentenv.identity.audit import Audit
from agentenv.identity.keys import Keys
from agentenv.identity.records import Quota, Rate
from agentenv.observe.observation import Observation
from agentenv.sandbox.observing import Running
from support.building_parts import Workplace
from support.sandbox_parts import MemoryNode

FIRST = "e2b_0123456789abcdef"
UNKNOWN = "iaaaaaaaaaaaaaaaaaaa"


async def said(running: Running) -> Mapping[str, object]:
    """What each guest answers to the question for its figures."""
    return {"mem_used": 1, "mem_total": 2, "disk_used": 3, "disk_total": 4}


class Teams:
    """A node, and clients of it by the names of their keys."""

    def __init__(self, place: Workplace, directory: Path) -> None:
        self.node: MemoryNode = place.node
        self.keys: Keys = self.node.keys(FIRST)
        self.audit_file = directory / "audit.log"
        self.audit = Audit(self.audit_file, file_bytes=1 << 20, files=1)
        self.node.service._core.quota_of = self.keys.quota_of
        self.observation = Observation(self.node.service, ask=said)
        self.app = create_app(
            self.node.service,
            self.node.templates,
            self.node.settings,
            keys=self.keys,
            port=8000,
            builder=place.builder,
            observation=self.observation,
            audit=self.audit,
        )
        self._clients: list[httpx.AsyncClient] = []

    def client(self, secret: str, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        made = httpx.AsyncClient(
            transport=transport,
            base_url="http://127.0.0.1:8000",
            headers={"X-API-KEY": secret, **headers},
            timeout=30,
        )
        self._clients.append(made)
        return made

    def team(self, project: str, **more: Any) -> httpx.AsyncClient:
        return self.client(self.keys.create(f"{project}-key", project, **more)[1])

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()
        self.audit.close()


@pytest.fixture
async def teams(tmp_path: Path) -> AsyncIterator[Teams]:
    place = Workplace(tmp_path, max_sandboxes=100)
    place.node.slots.capacity = 100
    await place.start()
    await place.node.prepare()
    made = Teams(place, tmp_path)
    yield made
    await made.close()
    await place.builder.stop()
    await place.node.service.stop()


@pytest.fixture
def first(teams: Teams) -> httpx.AsyncClient:
    return teams.client(FIRST)


@pytest.fixture
def blue(teams: Teams) -> httpx.AsyncClient:
    return teams.team("blue")


@pytest.fixture
def red(teams: Teams) -> httpx.AsyncClient:
    return teams.team("red")


async def create(client: httpx.AsyncClient, template: str = "base", **more: Any) -> str:
    answer = await client.post("/v2/sandboxes", json={"templateID": template, "timeout": 60, **more})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["sandboxID"])


async def ids(client: httpx.AsyncClient, path: str = "/v2/sandboxes", name: str = "sandboxID") -> set[str]:
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    return {each[name] for each in answer.json()}


ON_SANDBOXES: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "", None),
    ("DELETE", "", None),
    ("GET", "/metrics", None),
    ("GET", "/logs", None),
    ("GET", "/operations", None),
    ("GET", "/tree", None),
    ("POST", "/pause", None),
    ("POST", "/resume", {}),
    ("POST", "/connect", {"timeout": 10}),
    ("POST", "/timeout", {"timeout": 10}),
    ("POST", "/refreshes", {}),
    ("POST", "/refresh-memory", None),
    ("POST", "/snapshots", {}),
    ("POST", "/rollback", {}),
    ("POST", "/fork", {}),
    ("PUT", "/network", {}),
    ("PUT", "/limits", {}),
]


async def test_another_projects_sandbox_is_as_one_that_never_was(
    teams: Teams,
    first: httpx.AsyncClient,
    blue: httpx.AsyncClient,
    red: httpx.AsyncClient,
) -> None:
    sandbox = await create(blue)
    for method, path, body in ON_SANDBOXES:
        unknown = await red.request(method, f"/sandboxes/{UNKNOWN}{path}", json=body)
        for client in (red, first):
            answer = await client.request(method, f"/sandboxes/{sandbox}{path}", json=body)
            assert answer.status_code == 404, answer.text
            assert answer.text == unknown.text.replace(UNKNOWN, sandbox)
    assert teams.node.service.get(sandbox).project == "blue"
    assert (await blue.get(f"/sandboxes/{sandbox}")).status_code == 200


async def test_every_route_with_a_sandbox_is_guarded(teams: Teams) -> None:
    """Those above are all that there are."""
    calls = {
        (method.upper(), path.removeprefix("/v2").removeprefix("/sandboxes/{sandbox_id}"))
        for path, methods in teams.app.openapi()["paths"].items()
        if "{sandbox_id}" in path and "events" not in path
        for method in methods
    }
    assert calls == {(method, path) for method, path, _ in ON_SANDBOXES}


async def test_lists_and_figures_are_of_the_project(
    first: httpx.AsyncClient, blue: httpx.AsyncClient, red: httpx.AsyncClient
) -> None:
    mine, others = await create(blue), await create(red)
    for path in ("/v2/sandboxes", "/sandboxes"):
        assert await ids(blue, path) == {mine}
        assert await ids(red, path) == {others}
        assert await ids(first, path) == set()
    listed = await blue.get("/v2/sandboxes")
    assert listed.headers["X-Total-Running"] == "1"
    events = (await blue.get("/events/sandboxes")).json()
    assert {event["sandboxId"] for event in events} == {mine}
    assert (await blue.get(f"/events/sandboxes/{others}")).status_code == 404
    figures = (await blue.get("/sandboxes/metrics", params={"sandbox_ids": f"{mine},{others}"})).json()
    assert others not in figures["sandboxes"]


async def test_snapshots_are_the_projects_with_names_of_their_own(
    first: httpx.AsyncClient, blue: httpx.AsyncClient, red: httpx.AsyncClient
) -> None:
    made = {}
    for client in (first, blue, red):
        sandbox = await create(client)
        answer = await client.post(f"/sandboxes/{sandbox}/snapshots", json={"name": "point"})
        assert answer.status_code == 201, answer.text
        made[client] = answer.json()["snapshotID"]
    assert len(set(made.values())) == 3
    for client in (first, blue, red):
        assert await ids(client, "/snapshots", "snapshotID") == {made[client]}
        assert await ids(client, "/snapshots?name=point", "snapshotID") == {made[client]}
        assert (await client.get("/snapshots/point")).json()["snapshotID"] == made[client]
        await create(client, "point")
        for other in (first, blue, red):
            if other is not client:
                assert (await client.get(f"/snapshots/{made[other]}")).status_code == 404
                answer = await client.post("/v2/sandboxes", json={"templateID": made[other]})
                assert answer.status_code == 404
                assert (await client.delete(f"/templates/{made[other]}")).status_code == 404
    assert (await red.get("/snapshots/blue/point")).status_code == 404
    assert (await blue.delete("/templates/point")).status_code == 204
    assert await ids(blue, "/snapshots", "snapshotID") == set()
    assert await ids(red, "/snapshots", "snapshotID") == {made[red]}


async def build(client: httpx.AsyncClient, name: str, **more: Any) -> str:
    asked = await client.post("/v3/templates", json={"name": name})
    assert asked.status_code == 202, asked.text
    found = asked.json()
    path = f"/templates/{found['templateID']}/builds/{found['buildID']}"
    begun = await client.post(f"/v2{path}", json={"fromTemplate": "base", "steps": [], **more})
    assert begun.status_code == 202, begun.text
    while (status := (await client.get(f"{path}/status")).json())["status"] in ("waiting", "building"):
        await asyncio.sleep(0.01)
    assert status["status"] == "ready", status
    return str(found["templateID"])


async def test_templates_are_the_projects_until_they_are_published(
    first: httpx.AsyncClient, blue: httpx.AsyncClient, red: httpx.AsyncClient
) -> None:
    mine, others = await build(blue, "app"), await build(red, "app")
    assert mine != others
    assert (await blue.get("/templates/aliases/app")).json()["templateID"] == mine
    assert (await red.get("/templates/aliases/app")).json()["templateID"] == others
    assert (await first.get("/templates/aliases/app")).status_code == 404
    assert mine not in await ids(red, "/templates", "templateID")
    refused = [
        await red.get(f"/templates/{mine}"),
        await red.get("/templates/blue/app"),
        await red.get(f"/templates/{mine}/tags"),
        await red.get(f"/templates/{mine}/export"),
        await red.post("/v2/sandboxes", json={"templateID": mine}),
        await red.post("/sandboxes/batch", json={"templateID": "blue/app", "count": 1}),
        await red.patch(f"/v2/templates/{mine}", json={"public": True}),
        await red.post("/templates/tags", json={"target": "blue/app", "tags": ["x"]}),
        await red.request("DELETE", "/templates/tags", json={"name": "blue/app", "tags": ["default"]}),
        await red.delete(f"/templates/{mine}"),
    ]
    assert {answer.status_code for answer in refused} == {404}
    claimed = await red.post("/v3/templates", json={"name": "blue/other"})
    assert claimed.status_code == 403
    assert (await first.post("/v3/templates", json={"name": "blue/other"})).status_code == 403
    await create(blue, "app")
    # Published, it may be used by all and changed by its own alone.
    assert (await blue.patch("/v2/templates/app", json={"public": True})).status_code == 200
    assert mine in await ids(red, "/templates", "templateID")
    await create(red, "blue/app")
    assert (await red.delete("/templates/blue/app")).status_code == 404


async def test_builds_start_from_what_the_project_sees(
    blue: httpx.AsyncClient, red: httpx.AsyncClient
) -> None:
    await build(blue, "app")
    await build(blue, "above", fromTemplate="app")
    asked = (await red.post("/v3/templates", json={"name": "above"})).json()
    path = f"/v2/templates/{asked['templateID']}/builds/{asked['buildID']}"
    copied = {"type": "COPY", "args": ["/x", "/y"], "from": "blue/app"}
    for body in (
        {"fromTemplate": "blue/app", "steps": []},
        {"fromImage": "template://blue/app", "steps": []},
        {"fromTemplate": "base", "steps": [copied]},
    ):
        answer = await red.post(path, json=body)
        assert answer.status_code == 404, answer.text
    other = (await blue.post("/v3/templates", json={"name": "third"})).json()
    for method, end in (("GET", "/status"), ("GET", "/logs"), ("DELETE", "")):
        answer = await red.request(method, f"/templates/{other['templateID']}/builds/{other['buildID']}{end}")
        assert answer.status_code == 404
    files = f"/templates/{other['templateID']}/files/{'0' * 64}"
    assert (await red.get(files)).status_code == 404


async def test_an_idempotency_key_is_the_projects(blue: httpx.AsyncClient, red: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "same"}
    made = [
        (await client.post("/v2/sandboxes", json={"templateID": "base"}, headers=headers)).json()["sandboxID"]
        for client in (blue, red, blue)
    ]
    assert made[0] == made[2] != made[1]


async def test_an_admin_acts_for_a_project_that_it_names(teams: Teams, blue: httpx.AsyncClient) -> None:
    sandbox = await create(blue)
    for_blue = teams.client(FIRST, **{"X-AgentENV-Project": "blue"})
    assert await ids(for_blue) == {sandbox}
    assert (await for_blue.delete(f"/sandboxes/{sandbox}")).status_code == 204
    nowhere = teams.client(FIRST, **{"X-AgentENV-Project": "green"})
    assert (await nowhere.get("/v2/sandboxes")).status_code == 404
    users = teams.team("red")
    assert (await users.get("/v2/sandboxes", headers={"X-AgentENV-Project": "blue"})).status_code == 403


async def test_an_admin_sees_to_the_sandboxes_of_all(
    teams: Teams, blue: httpx.AsyncClient, red: httpx.AsyncClient
) -> None:
    mine, others = await create(blue), await create(red)
    every = teams.client(FIRST, **{"X-AgentENV-Project": "*"})
    listed = await every.get("/v2/sandboxes")
    assert {each["sandboxID"] for each in listed.json()} == {mine, others}
    assert listed.headers["X-Total-Running"] == "2"
    for sandbox in (mine, others):
        assert (await every.post(f"/sandboxes/{sandbox}/pause")).status_code == 204
    assert (await every.post("/v2/sandboxes", json={"templateID": "base"})).status_code == 403
    assert (await red.get("/v2/sandboxes", headers={"X-AgentENV-Project": "*"})).status_code == 403


async def test_only_admins_manage_keys(first: httpx.AsyncClient, blue: httpx.AsyncClient) -> None:
    for method, path in (
        ("GET", "/api-keys"),
        ("POST", "/api-keys"),
        ("DELETE", "/api-keys/first"),
        ("GET", "/metrics/sandboxes"),
    ):
        assert (await blue.request(method, path, json={})).status_code == 403
    body = {"name": "carol", "project": "green", "quota": {"sandboxes": 1}, "rateLimit": {"perSecond": 9}}
    made = (await first.post("/api-keys", json=body)).json()
    assert made["key"].startswith(made["mask"]["prefix"] + made["mask"]["maskedValuePrefix"])
    assert len(made["key"]) - len(made["mask"]["prefix"]) == made["mask"]["valueLength"]
    listed = await first.get("/api-keys")
    assert made["key"] not in listed.text
    (found,) = [key for key in listed.json() if key["id"] == made["id"]]
    assert (found["project"], found["scopes"], found["quota"]) == ("green", ["use"], {"sandboxes": 1})
    assert found["rateLimit"] == {"perSecond": 9.0, "burst": 9}
    renamed = await first.patch(f"/api-keys/{made['id']}", json={"name": "dora"})
    assert renamed.json()["name"] == "dora"
    again = (await first.post("/api-keys/dora/rotate")).json()
    assert again["key"] != made["key"]
    assert (await first.delete("/api-keys/dora")).status_code == 204
    assert (await first.delete("/api-keys/dora")).status_code == 404


async def test_a_revoked_key_is_refused_at_once_and_its_streams_end(teams: Teams) -> None:
    key, secret = teams.keys.create("eve", "blue")
    client = teams.client(secret)

    async def stream() -> str:
        return (await client.get("/events")).text

    following = asyncio.ensure_future(stream())
    while not teams.observation.events.following:
        await asyncio.sleep(0.01)
    teams.keys.revoke(key.id)
    assert (await asyncio.wait_for(following, 20)).startswith(": following")
    assert (await client.get("/v2/sandboxes")).status_code == 401


async def test_of_fifty_at_once_as_many_get_in_as_the_quota_says(teams: Teams) -> None:
    client = teams.team("blue", quota=Quota(sandboxes=3))
    calls = [client.post("/v2/sandboxes", json={"templateID": "base"}) for _ in range(50)]
    answers = await asyncio.gather(*calls)
    assert sorted(answer.status_code for answer in answers) == [201] * 3 + [429] * 47
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert "3 sandboxes: 3 are taken" in refused.json()["message"]
    assert refused.headers["should-retry"] == "false"
    assert len(await ids(client)) == 3
    await client.delete(f"/sandboxes/{(await ids(client)).pop()}")
    await create(client)


async def test_a_quota_of_processors_lets_paused_ones_be(teams: Teams) -> None:
    client = teams.team("blue", quota=Quota(vcpus=1))
    sandbox = await create(client)
    assert (await client.post(f"/sandboxes/{sandbox}/fork", json={})).status_code == 429
    assert teams.node.steps.passed.count("capture") == 0
    assert (await client.post(f"/sandboxes/{sandbox}/pause")).status_code == 204
    other = await create(client)
    assert (await client.post(f"/sandboxes/{sandbox}/resume", json={})).status_code == 429
    assert (await client.delete(f"/sandboxes/{other}")).status_code == 204
    assert (await client.post(f"/sandboxes/{sandbox}/resume", json={})).status_code == 201


async def test_a_rate_is_kept_to_by_fifty_callers(teams: Teams) -> None:
    client = teams.team("blue", rate=Rate(0.001, 5))
    answers = await asyncio.gather(*(client.get("/v2/sandboxes") for _ in range(50)))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 45
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["Retry-After"]) >= 1
    assert (await teams.client(FIRST).get("/v2/sandboxes")).status_code == 200


async def test_the_audit_log_says_who_did_what(teams: Teams, blue: httpx.AsyncClient) -> None:
    answer = await blue.post(
        "/v2/sandboxes",
        json={"templateID": "base", "envVars": {"TOKEN": "s3cret"}},
        headers={"X-Request-Id": "call-1"},
    )
    sandbox = answer.json()["sandboxID"]
    await blue.get(f"/sandboxes/{sandbox}")
    await blue.delete(f"/sandboxes/{sandbox}")
    await blue.delete(f"/sandboxes/{UNKNOWN}")
    key = blue.headers["X-API-KEY"]
    teams.audit.close()
    text = teams.audit_file.read_text()
    assert "s3cret" not in text
    assert key not in text
    created, killed, missed = [json.loads(line) for line in text.splitlines()]
    assert (created["key"], created["project"], created["made"]) == ("blue-key", "blue", sandbox)
    assert (created["method"], created["route"], created["status"]) == ("POST", "/v2/sandboxes", 201)
    assert created["request_id"] == "call-1"
    assert (killed["target"], killed["status"]) == ({"sandbox_id": sandbox}, 204)
    assert (missed["target"], missed["status"]) == ({"sandbox_id": UNKNOWN}, 404)
