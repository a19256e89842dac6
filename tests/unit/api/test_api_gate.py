"""Keys, bodies, unknown routes, and the rest of what every request passes."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from agentenv.api.app import create_app
from agentenv.api.domain import advertised
from agentenv.api.gate import BODY_LIMIT_BYTES
from agentenv.api.planned import PLANNED
from agentenv.config import Settings
from agentenv.errors import HostFault, StoreCorrupt
from agentenv.identity import first as key
from support.sandbox_parts import MemoryNode

KEY = "e2b_0123456789abcdef"


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    node = MemoryNode(tmp_path)
    await node.service.start()
    app = create_app(node.service, node.templates, node.settings, keys=node.keys(KEY), port=8000)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        yield client
    await node.service.stop()


def assert_fault(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status, answer.text
    assert answer.json()["code"] == status
    body = answer.json()
    assert set(body) - {"remedy"} == {"code", "message"}
    assert body["message"].endswith(f"({body['remedy']})" if "remedy" in body else "")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("X-API-KEY", "wrong")],
        [("X-API-KEY", "")],
        [("X-API-KEY", KEY.upper())],
        [("X-API-KEY", KEY), ("x-api-key", KEY)],
        [("X-API-KEY", KEY + "\u00e4")],
        [("Authorization", f"Bearer {KEY}")],
    ],
)
async def test_no_way_in_without_the_one_right_key(
    client: httpx.AsyncClient, headers: list[tuple[str, str]]
) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    for method, path in [
        ("GET", "/v2/sandboxes"),
        ("POST", "/sandboxes"),
        ("GET", "/templates"),
        ("GET", "/x"),
    ]:
        answer = await client.request(method, path, headers=raw)
        assert_fault(answer, 401)
        assert answer.headers["should-retry"] == "false"


async def test_the_name_of_the_header_is_of_any_case(client: httpx.AsyncClient) -> None:
    for name in ("X-API-Key", "x-api-key", "X-Api-KEY"):
        assert (await client.get("/v2/sandboxes", headers={name: KEY})).status_code == 200


async def test_health_and_the_description_need_no_key(client: httpx.AsyncClient) -> None:
    answer = await client.get("/health")
    assert (answer.status_code, answer.content) == (204, b"")
    description = (await client.get("/openapi.json")).json()
    assert {"/v2/sandboxes", "/sandboxes/{sandbox_id}", "/templates"} <= set(description["paths"])
    assert "post" in description["paths"]["/v2/sandboxes"]
    assert (await client.get("/docs")).status_code == 200


async def test_unknown_routes_and_methods(client: httpx.AsyncClient) -> None:
    client.headers["X-API-KEY"] = KEY
    for path in ("/", "/nope", "/sandboxes/", "/v2", "/v2/sandboxes/x/y/z", "/%ff", "//sandboxes"):
        assert_fault(await client.get(path), 404)
    answer = await client.put("/v2/sandboxes")
    assert_fault(answer, 405)
    assert answer.headers["allow"]


async def test_planned_parts_are_501(client: httpx.AsyncClient) -> None:
    client.headers["X-API-KEY"] = KEY
    for method, path, _ in PLANNED:
        assert_fault(await client.request(method, re.sub(r"\{\w+(:path)?\}", "x", path)), 501)


async def test_a_body_that_says_it_is_huge_is_not_read(client: httpx.AsyncClient) -> None:
    client.headers["X-API-KEY"] = KEY
    body = b'{"templateID": "' + b"x" * BODY_LIMIT_BYTES + b'"}'
    answer = await client.post("/v2/sandboxes", content=body)
    assert_fault(answer, 413)
    assert answer.headers["connection"] == "close"


async def test_a_huge_body_that_does_not_say_so_is_cut_off(client: httpx.AsyncClient) -> None:
    client.headers["X-API-KEY"] = KEY
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 100 * BODY_LIMIT_BYTES:
            sent += 65536
            yield b" " * 65536

    assert_fault(await client.post("/v2/sandboxes", content=endless()), 413)
    assert sent <= 2 * BODY_LIMIT_BYTES


async def test_a_body_at_the_limit_is_read(client: httpx.AsyncClient) -> None:
    client.headers["X-API-KEY"] = KEY
    body = b'{"templateID": "base"}'
    answer = await client.post("/v2/sandboxes", content=body + b" " * (BODY_LIMIT_BYTES - len(body)))
    assert answer.status_code == 201


async def test_browsers_may_call(client: httpx.AsyncClient) -> None:
    origin = {"Origin": "https://x.example"}
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "x-api-key,content-type",
    }
    answer = await client.options("/v2/sandboxes", headers={**origin, **preflight})
    assert answer.status_code == 200
    assert "x-api-key" in answer.headers["access-control-allow-headers"].lower()
    listed = await client.get("/v2/sandboxes", headers={**origin, "X-API-KEY": KEY})
    assert listed.headers["access-control-allow-origin"] == "*"
    assert "x-next-token" in listed.headers["access-control-expose-headers"]
    refused = await client.get("/v2/sandboxes", headers=origin)
    assert refused.headers["access-control-allow-origin"] == "*"


async def test_templates(client: httpx.AsyncClient) -> None:
    from e2b.api.client.models import Template, TemplateAliasResponse

    client.headers["X-API-KEY"] = KEY
    for path in ("/templates", "/v2/templates"):
        [item] = (await client.get(path, params={"teamID": "x"})).json()
        template = Template.from_dict(item)
        assert (template.template_id, template.names, template.build_status) == ("tbase", ["base"], "ready")
        assert template.created_at.tzinfo is not None
    one = (await client.get("/templates/base")).json()
    assert one["builds"][0]["status"] == "ready"
    alias = TemplateAliasResponse.from_dict((await client.get("/templates/aliases/base")).json())
    assert alias.template_id == "tbase"
    for path in ("/templates/aliases/nope", "/templates/aliases/a%2Fb", "/templates/nope"):
        assert_fault(await client.get(path), 404)


# The key's file


def test_a_key_is_made_once_and_kept_to_its_owner(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    made = key.load_or_create(settings)
    assert re.fullmatch(r"e2b_[0-9a-f]{40}", made)
    status = settings.api_key_file.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == tmp_path.stat().st_uid
    assert key.load_or_create(settings) == made
    assert [each.name for each in tmp_path.iterdir()] == ["api-key"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_key_belongs_to_whom_the_data_belongs(tmp_path: Path) -> None:
    os.chown(tmp_path, 1234, 1235)
    key.load_or_create(Settings(home=tmp_path))
    status = (tmp_path / "api-key").stat()
    assert (status.st_uid, status.st_gid) == (1234, 1235)


def test_a_key_in_the_settings_wins_and_writes_nothing(tmp_path: Path) -> None:
    assert key.load_or_create(Settings(home=tmp_path, api_key="mine")) == "mine"
    assert list(tmp_path.iterdir()) == []


def test_an_empty_key_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text("\n")
    with pytest.raises(StoreCorrupt, match="empty"):
        key.load_or_create(Settings(home=tmp_path))


def test_a_key_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "api-key").mkdir()
    with pytest.raises(HostFault, match="api-key"):
        key.load_or_create(Settings(home=tmp_path))


@pytest.mark.parametrize(
    ("domain", "host", "told"),
    [
        ("localhost", "127.0.0.1:8000", "localhost:8000"),
        ("localhost", "localhost:8000", "localhost:8000"),
        ("localhost", "", "localhost:8000"),
        ("localhost", "api.my.example:8443", None),
        ("my.example", "127.0.0.1:8000", "my.example"),
        ("my.example:8443", "api.my.example", "my.example:8443"),
    ],
)
def test_which_domain_is_told(tmp_path: Path, domain: str, host: str, told: str | None) -> None:
    assert advertised(Settings(home=tmp_path, domain=domain), host, 8000) == told
