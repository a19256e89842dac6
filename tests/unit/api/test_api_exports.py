"""The export of a template over HTTP, with parts in memory: the archive, and what is left of a failed one."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentenv.api.app import create_app
from support.building_parts import Workplace

KEY = "e2b_0123456789abcdef"
PROGRAM = "nameserver 169.254.0.22\n"  # by its last word
LAYER = "the layer" * 1000


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Workplace]:
    place = Workplace(tmp_path)
    place.says[PROGRAM] = LAYER
    await place.start()
    await place.node.prepare()
    yield place
    await place.builder.stop()
    await place.node.service.stop()


def app_of(place: Workplace) -> Any:
    node = place.node
    return create_app(
        node.service,
        node.templates,
        node.settings,
        keys=node.keys(KEY),
        port=8000,
        builder=place.builder,
    )


@pytest.fixture
async def client(place: Workplace) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app_of(place), raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:8000", headers={"X-API-KEY": KEY}
    ) as client:
        yield client


def assert_nothing_left(place: Workplace) -> None:
    place.node.assert_empty()
    promised = place.node.service.admission.promised
    assert (promised.disk_mib, promised.memory_mib) == (0, 0)
    opened = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    assert [name for name in opened if name.startswith(str(place.builder.contexts.directory))] == []


async def test_an_archive(client: httpx.AsyncClient, place: Workplace) -> None:
    answer = await client.get("/templates/base/export")
    assert answer.status_code == 200
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["content-disposition"] == 'attachment; filename="base.tar"'
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        blobs = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    (listed,) = json.loads(blobs["index.json"])["manifests"]
    manifest = json.loads(blobs["blobs/sha256/" + listed["digest"][7:]])
    (layer,) = manifest["layers"]
    assert blobs["blobs/sha256/" + layer["digest"][7:]] == LAYER.encode()
    config = json.loads(blobs["blobs/sha256/" + manifest["config"]["digest"][7:]])
    assert config["rootfs"]["diff_ids"] == [layer["digest"]]
    assert config["config"]["User"] == "user"
    assert_nothing_left(place)


async def test_what_cannot_be_exported(client: httpx.AsyncClient, place: Workplace) -> None:
    assert (await client.get("/templates/none/export")).status_code == 404
    place.failing[PROGRAM] = "exit status 1"
    failed = await client.get("/templates/base/export")
    assert failed.status_code == 500
    assert "the template cannot be exported: exit status 1" in failed.json()["message"]
    assert_nothing_left(place)


async def test_more_than_a_disk_can_hold_is_not_taken(
    client: httpx.AsyncClient, place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.building.export.LIMIT_FACTOR", 0)
    failed = await client.get("/templates/base/export")
    assert failed.status_code == 500
    assert "more files than its disk can hold" in failed.json()["message"]
    assert_nothing_left(place)


async def asked(place: Workplace, receive: asyncio.Queue[MutableMapping[str, Any]], sent: list[Any]) -> None:
    """Ask the application itself, as a server does whose client may go away."""
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/templates/base/export",
        "raw_path": b"/templates/base/export",
        "query_string": b"",
        "headers": [(b"x-api-key", KEY.encode()), (b"host", b"127.0.0.1:8000")],
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 1),
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
    }

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and message.get("more_body"):
            await asyncio.sleep(0)

    await app_of(place)(scope, receive.get, send)


async def test_a_client_that_goes_away_while_it_is_made(place: Workplace) -> None:
    place.steps.hold(f"run {PROGRAM}")
    messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    asking = asyncio.create_task(asked(place, messages, []))
    await place.steps.reached(f"run {PROGRAM}")
    assert place.node.service.admission.promised.disk_mib > 0
    messages.put_nowait({"type": "http.disconnect"})
    await asking
    assert_nothing_left(place)


async def test_two_at_once(client: httpx.AsyncClient, place: Workplace) -> None:
    answers = await asyncio.gather(*(client.get("/templates/base/export") for _ in range(2)))
    assert {answer.status_code for answer in answers} == {200}
    assert answers[0].content == answers[1].content, "the same template gives the same archive"
    assert_nothing_left(place)
