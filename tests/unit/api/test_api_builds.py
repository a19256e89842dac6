"""The build and template routes over HTTP, read by E2B's own generated client, with parts in memory."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from e2b.api.client.models import (
    AssignedTemplateTags,
    Template,
    TemplateBuildFileUpload,
    TemplateBuildInfo,
    TemplateRequestResponseV3,
    TemplateTag,
    TemplateWithBuilds,
)

from agentenv.api.app import create_app
from support.building_parts import Workplace

KEY = "e2b_0123456789abcdef"
FILES = "a" * 64


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Workplace]:
    place = Workplace(tmp_path, context_max_mib=2)
    await place.start()
    await place.node.prepare()
    yield place
    await place.builder.stop()
    await place.node.service.stop()


@pytest.fixture
async def client(place: Workplace) -> AsyncIterator[httpx.AsyncClient]:
    node = place.node
    app = create_app(
        node.service,
        node.templates,
        node.settings,
        keys=node.keys(KEY),
        port=8000,
        builder=place.builder,
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:8000", headers={"X-API-KEY": KEY}
    ) as client:
        yield client


def assert_fault(answer: httpx.Response, status: int, words: str = "") -> None:
    assert answer.status_code == status, answer.text
    assert answer.json()["code"] == status
    assert words in answer.json()["message"]


async def opened(client: httpx.AsyncClient, **body: Any) -> TemplateRequestResponseV3:
    answer = await client.post("/v3/templates", json={"name": "mine", **body})
    assert answer.status_code == 202, answer.text
    return TemplateRequestResponseV3.from_dict(answer.json())


async def begun(client: httpx.AsyncClient, build: TemplateRequestResponseV3, **body: Any) -> None:
    path = f"/v2/templates/{build.template_id}/builds/{build.build_id}"
    answer = await client.post(path, json={"fromTemplate": "base", "steps": [], "force": False, **body})
    assert (answer.status_code, answer.content) == (202, b""), answer.text


async def ended(
    client: httpx.AsyncClient, build: TemplateRequestResponseV3, **query: Any
) -> TemplateBuildInfo:
    path = f"/templates/{build.template_id}/builds/{build.build_id}/status"
    while True:
        answer = await client.get(path, params=query)
        info = TemplateBuildInfo.from_dict(answer.json())
        if info.status.value in ("ready", "error"):
            return TemplateBuildInfo.from_dict((await client.get(path, params=query)).json())
        await asyncio.sleep(0)


async def built(client: httpx.AsyncClient, name: str, *texts: str) -> TemplateRequestResponseV3:
    build = await opened(client, name=name)
    await begun(client, build, steps=[{"type": "RUN", "args": [text]} for text in texts])
    assert (await ended(client, build)).status.value == "ready"
    return build


# Builds


async def test_from_a_request_to_a_template(client: httpx.AsyncClient) -> None:
    build = await opened(client, name="Space/Mine:v1", tags=["latest"], cpuCount=2, memoryMB=1024)
    assert (build.names, build.aliases, build.tags) == (["space/mine"], ["space/mine"], ["v1", "latest"])
    [waiting] = [
        each for each in (await client.get("/templates")).json() if each["templateID"] == build.template_id
    ]
    shown = Template.from_dict(waiting)
    assert (shown.build_status.value, shown.cpu_count, shown.memory_mb) == ("waiting", 2, 1024)
    await begun(
        client, build, steps=[{"type": "run", "args": ["one"], "extra": 1}], startCmd="serve", readyCmd="up"
    )
    info = await ended(client, build)
    assert info.status.value == "ready"
    told = [(entry.level.value, entry.message, entry.step) for entry in info.log_entries]
    assert ("info", "[1/1] RUN one", "1") in told
    assert ("info", "[start] [stdout]: ran serve", "finalize") in told
    assert ("debug", "[ready] [stdout]: ran up", "finalize") in told
    detail = await client.get("/templates/space%2Fmine")
    found = TemplateWithBuilds.from_dict(detail.json())
    assert [(each.status.value, str(each.build_id)) for each in found.builds] == [("ready", build.build_id)]
    assert (await client.get("/templates/aliases/space%2Fmine")).json()["templateID"] == build.template_id
    created = await client.post("/v2/sandboxes", json={"templateID": "space/mine:latest"})
    assert created.status_code == 201, created.text
    assert (await client.get(f"/sandboxes/{created.json()['sandboxID']}")).json()["memoryMB"] == 1024
    assert_fault(await client.delete("/templates/space%2Fmine"), 409, "used by 1 sandbox")


async def test_a_failure_has_its_reason(client: httpx.AsyncClient, place: Workplace) -> None:
    place.failing["one"] = "exit status 3"
    build = await opened(client)
    await begun(client, build, steps=[{"type": "ENV", "args": ["A", "1"]}, {"type": "RUN", "args": ["one"]}])
    answer = await ended(client, build)
    assert answer.status.value == "error"
    raw = (await client.get(f"/templates/mine/builds/{build.build_id}/status")).json()
    assert raw["reason"] == {"message": "failed to run command 'one': exit status 3", "step": "2"}
    assert raw["logs"] == []
    [listed] = (await client.get("/templates/mine")).json()["builds"]
    assert listed["status"] == "error"


async def test_logs_are_drained_by_offset(client: httpx.AsyncClient) -> None:
    build = await built(client, "mine", *(f"command {number}" for number in range(60)))
    path = f"/templates/mine/builds/{build.build_id}"
    entries: list[Any] = []
    while page := (await client.get(f"{path}/status", params={"logsOffset": len(entries)})).json()[
        "logEntries"
    ]:
        assert len(page) <= 100
        entries += page
    assert len(entries) > 120
    more = (await client.get(f"{path}/logs", params={"logsOffset": 5, "limit": 3})).json()["logs"]
    assert more == entries[5:8]
    assert_fault(await client.get(f"{path}/status", params={"limit": 101}), 400)
    assert_fault(await client.get(f"{path}/status", params={"level": "loud"}), 400)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"steps": [{"type": "ONBUILD", "args": []}]}, 400, "step 1"),
        ({"fromImage": "a", "fromTemplate": "b"}, 400, "both"),
        ({"fromImageRegistry": {"type": "registry", "username": "u"}}, 400, "password"),
        ({"fromImageRegistry": {"type": "aws", "awsRegion": "x"}}, 400, "awsAccessKeyId"),
    ],
)
async def test_a_refused_definition_leaves_no_build_waiting(
    client: httpx.AsyncClient, body: dict[str, Any], status: int, words: str
) -> None:
    build = await opened(client)
    path = f"/v2/templates/{build.template_id}/builds/{build.build_id}"
    assert_fault(await client.post(path, json=body), status, words)
    info = await ended(client, build)
    assert info.status.value == "error"
    assert words in info.to_dict()["reason"]["message"]
    assert_fault(await client.post(path, json={"fromTemplate": "base"}), 409)


@pytest.mark.parametrize(
    "body", [{}, {"name": ""}, {"name": "a:b:c"}, {"name": "a", "tags": [":x"]}, {"name": "a", "cpuCount": 0}]
)
async def test_requests_that_cannot_be(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    assert_fault(await client.post("/v3/templates", json=body), 400)
    assert len((await client.get("/templates")).json()) == 1


async def test_what_is_not_there(client: httpx.AsyncClient) -> None:
    build = await opened(client)
    for path in (f"/templates/base/builds/{build.build_id}/status", "/templates/mine/builds/none/status"):
        assert_fault(await client.get(path), 404)
    assert_fault(await client.post("/v2/templates/none/builds/none", json={}), 404)
    assert_fault(await client.delete(f"/templates/base/builds/{build.build_id}"), 404)


async def test_registry_credentials_go_to_the_pull_and_nowhere_else(
    client: httpx.AsyncClient, place: Workplace
) -> None:
    build = await opened(client)
    registry = {"type": "gcp", "serviceAccountJson": "secret words"}
    await begun(client, build, fromTemplate=None, fromImage="private/image", fromImageRegistry=registry)
    assert (await ended(client, build)).status.value == "ready"
    [(_, credentials)] = place.images.asked
    assert credentials is not None
    assert (credentials.username, credentials.password) == ("_json_key", "secret words")
    shown = (await client.get(f"/templates/mine/builds/{build.build_id}/status")).text
    assert "secret" not in shown + (await client.get("/templates/mine")).text


# Files


def archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("a")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"a"))
    return buffer.getvalue()


async def test_uploads(client: httpx.AsyncClient, place: Workplace) -> None:
    build = await opened(client)
    answer = await client.get(f"/templates/{build.template_id}/files/{FILES}")
    assert answer.status_code == 201
    link = TemplateBuildFileUpload.from_dict(answer.json())
    assert link.present is False
    url = str(link.url)
    assert urlsplit(url).netloc == "127.0.0.1:8000"
    without_key = {"X-API-KEY": ""}
    other = url.replace(FILES, "b" * 64)
    assert_fault(await client.put(other, content=archive(), headers=without_key), 403, "link")
    assert_fault(await client.put(url.partition("?")[0], content=archive(), headers=without_key), 403)
    large = await client.put(url, content=bytes(3 << 20), headers=without_key)
    assert_fault(large, 400, "more than 2 MiB")
    assert list(place.builder.contexts.directory.iterdir()) == []
    assert (await client.put(url, content=archive(), headers=without_key)).status_code == 200
    assert (await client.get(f"/templates/{build.template_id}/files/{FILES}")).json()["present"] is True
    copy = {"type": "COPY", "args": ["a", "b", "", ""], "filesHash": FILES}
    await begun(client, build, steps=[copy])
    assert (await ended(client, build)).status.value == "ready"
    assert len(place.put) == 1


@pytest.mark.parametrize("digest", ["a", "A" * 64, "../" + "a" * 61])
async def test_hashes_that_are_none(client: httpx.AsyncClient, digest: str) -> None:
    await opened(client)
    assert (await client.get(f"/templates/mine/files/{digest}")).status_code in (400, 404)


# Tags, publishing, deleting


async def test_tags(client: httpx.AsyncClient) -> None:
    first = await built(client, "mine:v1", "one")
    second = await built(client, "mine:v2", "two")
    answer = await client.post("/templates/tags", json={"target": "mine:v1", "tags": ["Stable", "v2"]})
    assert answer.status_code == 201
    assigned = AssignedTemplateTags.from_dict(answer.json())
    assert (assigned.tags, str(assigned.build_id)) == (["stable", "v2"], first.build_id)
    answer = await client.get(f"/templates/{first.template_id}/tags")
    tags = [TemplateTag.from_dict(each) for each in answer.json()]
    assert {(tag.tag, str(tag.build_id)) for tag in tags} == {
        (tag, first.build_id) for tag in ("stable", "v1", "v2")
    }
    assert second.template_id == first.template_id
    answer = await client.request("DELETE", "/templates/tags", json={"name": "mine", "tags": ["v1", "v2"]})
    assert answer.status_code == 204
    assert [each["tag"] for each in (await client.get("/templates/mine/tags")).json()] == ["stable"]
    for alias, status in (("mine", 200), ("mine:stable", 200), ("mine:v1", 404)):
        assert (await client.get(f"/templates/aliases/{alias}")).status_code == status
    assert_fault(
        await client.post("/templates/tags", json={"target": "mine:v1", "tags": ["x"]}), 404, "stable"
    )
    assert_fault(await client.post("/templates/tags", json={"target": "mine:stable", "tags": [":x"]}), 400)
    assert_fault(await client.request("DELETE", "/templates/tags", json={"name": "none", "tags": ["x"]}), 404)


async def test_publishing(client: httpx.AsyncClient) -> None:
    for version in ("", "/v2"):
        for public in (False, True):
            answer = await client.patch(f"{version}/templates/base", json={"public": public})
            assert answer.json() == {"names": ["base"]}
            assert (await client.get("/templates/aliases/base")).json()["public"] is public
    assert_fault(await client.patch("/v2/templates/none", json={"public": True}), 404)


async def test_cancelled_and_deleted(client: httpx.AsyncClient, place: Workplace) -> None:
    place.steps.hold("run one")
    build = await opened(client)
    await begun(client, build, steps=[{"type": "RUN", "args": ["one"]}])
    await place.steps.reached("run one")
    path = f"/templates/mine/builds/{build.build_id}"
    for _ in range(2):
        assert (await client.delete(path)).status_code == 204
    assert (await ended(client, build)).to_dict()["reason"]["message"] == "the build was cancelled"
    assert_fault(await client.delete("/templates/mine:v1"), 400, "a tag of the template mine")
    assert (await client.delete("/templates/mine")).status_code == 204
    assert_fault(await client.get(f"{path}/status"), 404)
    place.node.assert_empty()
