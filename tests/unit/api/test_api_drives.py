"""Sizes, images and drives over HTTP: what comes in, and what is shown."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentenv.api.app import create_app
from support.sandbox_parts import MemoryNode, prepared

KEY = "e2b_0123456789abcdef"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[MemoryNode]:
    async with prepared(tmp_path) as node:
        yield node


@pytest.fixture
async def client(node: MemoryNode) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(node.service, node.templates, node.settings, keys=node.keys(KEY), port=8000)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False),
        base_url="http://127.0.0.1:8000",
        headers={"X-API-KEY": KEY},
    ) as client:
        yield client


async def shown(client: httpx.AsyncClient, answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 201, answer.text
    return dict((await client.get(f"/sandboxes/{answer.json()['sandboxID']}")).json())


async def test_a_sandbox_of_an_image(client: httpx.AsyncClient) -> None:
    body = {
        "image": "python:3.12",
        "cpuCount": 2,
        "memoryMB": 1024,
        "diskSizeMB": 2048,
        "metadata": {"a": "b"},
    }
    detail = await shown(client, await client.post("/sandboxes-cold", json=body))
    assert [detail[name] for name in ("alias", "cpuCount", "memoryMB", "diskSizeMB", "metadata")] == [
        "python:3.12", 2, 1024, 2048, {"a": "b"},
    ]  # fmt: skip
    assert "attachedDrives" not in detail
    answer = await client.post("/sandboxes-cold", json={"image": "missing"})
    assert (answer.status_code, "missing" in answer.json()["message"]) == (400, True)
    assert (await client.post("/sandboxes-cold", json={"cpuCount": 1})).status_code == 400


@pytest.mark.parametrize("path", ["/sandboxes", "/v2/sandboxes", "/sandboxes-cold"])
async def test_drives_are_shown(client: httpx.AsyncClient, path: str) -> None:
    drives = [
        {"driveID": "data", "source": {"image": "debian:12"}, "subPath": "set"},
        {"id": "work", "image": "debian:12", "readOnly": False, "mountPath": "/srv/w", "diskSizeMB": 4096},
    ]
    body = {"templateID": "base", "image": "python:3.12", "attachedDrives": drives}
    detail = await shown(client, await client.post(path, json=body))
    data = {"id": "data", "image": "debian:12", "mountPath": "/mnt/data", "subPath": "set"}
    assert detail["attachedDrives"] == [
        {**data, "readOnly": True, "diskSizeMB": 1024},
        {"id": "work", "image": "debian:12", "mountPath": "/srv/w", "readOnly": False, "diskSizeMB": 4096},
    ]


async def test_many_at_once_have_a_drive_each(client: httpx.AsyncClient, node: MemoryNode) -> None:
    drives = [{"id": "work", "image": "debian:12", "readOnly": False}]
    body = {"templateID": "base", "count": 2, "cpuCount": 2, "attachedDrives": drives}
    answers = (await client.post("/sandboxes/batch", json=body)).json()
    ids = [each["sandbox"]["sandboxID"] for each in answers]
    assert [node.hypervisor.machines[each].spec.drives[0].writable for each in ids] == [True, True]
    assert node.images.asked == ["docker:debian:12"]


@pytest.mark.parametrize(
    "given",
    [
        {"attachedDrives": [{"id": "a/b", "image": "x"}]},
        {"attachedDrives": [{"id": "a", "image": "x"}] * 2},
        {"attachedDrives": [{"id": str(number), "image": "x"} for number in range(5)]},
        {"attachedDrives": [{"id": "a"}]},
        {"attachedDrives": [{"id": "a", "image": "x", "mountPath": "/proc"}]},
        {"attachedDrives": [{"id": "a", "image": "/etc"}]},
        {"cpuCount": 0},
        {"memoryMB": 1},
        {"diskSizeMB": 64},
    ],
)
async def test_what_cannot_be_is_refused_before_anything_is_made(
    client: httpx.AsyncClient, node: MemoryNode, given: dict[str, Any]
) -> None:
    answer = await client.post("/v2/sandboxes", json={"templateID": "base", **given})
    assert answer.status_code == 400, answer.text
    assert node.images.asked == [] and node.steps.passed == []
