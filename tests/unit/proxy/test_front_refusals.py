"""What the front answers by itself, and what it does not let through."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest
from websockets.asyncio.client import connect as connect_websocket
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import InvalidStatus

from support.front_node import Node, head_for, read_answer, read_head


async def ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        head = await read_head(reader)
        if b"Content-Length: 5" in head:
            await reader.readexactly(5)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_an_unknown_sandbox(node: Node) -> None:
    async with httpx.AsyncClient(base_url=node.url) as client:
        for method in ("GET", "POST"):
            answer = await client.request(
                method,
                "/health",
                content=b"x" * 1000 if method == "POST" else None,
                headers={"E2b-Sandbox-Id": "gone", "E2b-Sandbox-Port": "49983"},
            )
            assert answer.status_code == 502
            assert answer.text == '{"sandboxId":"gone","message":"The sandbox was not found","code":502}'
            assert answer.headers["access-control-allow-origin"] == "*"


async def test_a_closed_port(node: Node) -> None:
    node.sandboxes.add("abc")
    port = closed_port()
    async with node.client() as (reader, writer):
        for _ in range(2):  # the connection stays usable
            writer.write(head_for("abc", port, "/", "POST", "Content-Length: 3") + b"abc")
            status, _, body = await read_answer(reader)
            assert status == 502
            assert json.loads(body) == {
                "sandboxId": "abc",
                "message": "The sandbox is running but port is not open",
                "port": port,
                "code": 502,
            }


async def test_a_port_that_opens_a_moment_later_is_reached(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.proxy.dial.PAUSES_S", (0.05,) * 400)
    node.sandboxes.add("abc")
    port = closed_port()
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port))
        await asyncio.sleep(0.1)
        await node.guest(ok, port)
        assert (await read_answer(reader))[0] == 200


async def test_a_sandbox_that_ends_while_its_port_is_tried(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.proxy.dial.PAUSES_S", (0.05,) * 400)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", closed_port()))
        await asyncio.sleep(0.1)
        del node.sandboxes.routes["abc"]
        node.plane.abort("abc", 1)
        status, _, body = await read_answer(reader)
        assert (status, json.loads(body)["message"]) == (502, "The sandbox was not found")


async def test_half_a_pair_of_headers(node: Node) -> None:
    async with httpx.AsyncClient(base_url=node.url) as client:
        answer = await client.get("/", headers={"E2b-Sandbox-Id": "abc"})
        assert answer.status_code == 400
        assert answer.json()["code"] == 400
        answer = await client.get("/proxy/x")
        assert answer.status_code == 400


async def test_the_traffic_token_of_a_private_sandbox(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    port = await node.guest(ok)
    node.sandboxes.add("abc", public=False, token="sesame")
    base = {"E2b-Sandbox-Id": "abc", "E2b-Sandbox-Port": str(port)}
    async with httpx.AsyncClient(base_url=node.url) as client:
        for token, status in ((None, 403), ("", 403), ("wrong", 403), ("sesame", 200)):
            fields = base if token is None else {**base, "e2b-traffic-access-token": token}
            answer = await client.get("/", headers=fields)
            assert answer.status_code == status
        node.sandboxes.add("abc", public=False, token=None)  # no token opens nothing
        answer = await client.get("/", headers={**base, "e2b-traffic-access-token": ""})
        assert answer.status_code == 403
        assert answer.json()["sandboxId"] == "abc"
        monkeypatch.setattr("agentenv.proxy.plane.AGENT_PORT", port)  # the agent checks for itself
        assert (await client.get("/", headers=base)).status_code == 200


async def test_a_browser_may_ask_a_private_sandbox_first(node: Node) -> None:
    """A preflight has no token; its answer lets the browser send the request with it."""
    port = await node.guest(ok)
    node.sandboxes.add("abc", public=False, token="sesame")
    async with node.client() as (reader, writer):
        writer.write(
            head_for(
                "abc",
                port,
                "/",
                "OPTIONS",
                "Origin: https://a.test",
                "Access-Control-Request-Method: GET",
                "Access-Control-Request-Headers: e2b-traffic-access-token",
            )
        )
        status, fields, _ = await read_answer(reader)
        assert (status, fields["access-control-allow-headers"]) == (204, "*")
        writer.write(head_for("abc", port, "/", "OPTIONS"))  # any other is a request like all
        assert (await read_answer(reader))[0] == 403


async def test_a_websocket_of_a_private_sandbox_needs_the_token(node: Node) -> None:
    node.sandboxes.add("abc", public=False, token="sesame")
    async with serve(_nothing, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        fields = {"E2b-Sandbox-Id": "abc", "E2b-Sandbox-Port": str(port)}
        with pytest.raises(InvalidStatus, match="403"):
            await connect_websocket(f"ws://127.0.0.1:{node.port}/", additional_headers=fields)


async def _nothing(connection: ServerConnection) -> None:
    pass


async def test_the_agents_internal_paths(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    port = await node.guest(ok)
    monkeypatch.setattr("agentenv.proxy.plane.AGENT_PORT", port)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        for path in ("/init", "//freeze", "/x/..%2finit?a", "http://localhost/init", "/proxy/init"):
            writer.write(head_for("abc", port, path, "POST", "Content-Length: 5") + b"12345")
            assert (await read_answer(reader))[0] == 404
        writer.write(head_for("abc", port, "/health"))
        assert (await read_answer(reader))[0] == 200


async def test_a_browser_gets_a_page(node: Node) -> None:
    async with httpx.AsyncClient(base_url=node.url) as client:
        answer = await client.get(
            "/",
            headers={
                "Host": "80-<b>.box.test",
                "E2b-Sandbox-Id": "<b>gone",
                "E2b-Sandbox-Port": "80",
                "User-Agent": "Mozilla/5.0",
                "Accept": "text/html,*/*",
            },
        )
    assert answer.status_code == 502
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "The sandbox was not found" in answer.text
    assert "&lt;b&gt;gone" in answer.text
    assert "<b>" not in answer.text


async def test_a_preflight_is_allowed_so_that_the_error_shows(node: Node) -> None:
    async with httpx.AsyncClient(base_url=node.url) as client:
        answer = await client.options(
            "/",
            headers={
                "E2b-Sandbox-Id": "gone",
                "E2b-Sandbox-Port": "80",
                "Origin": "https://a.test",
                "Access-Control-Request-Method": "POST",
            },
        )
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-methods"] == "*"


async def test_a_signed_url_finds_its_sandbox(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    port = await node.guest(ok)
    monkeypatch.setattr("agentenv.proxy.plane.AGENT_PORT", port)
    node.sandboxes.add("abc")
    node.sandboxes.signatures["v1_good"] = "abc"
    async with httpx.AsyncClient(base_url=node.url) as client:
        answer = await client.get("/files?path=/a&signature=v1_good&signature_expiration=99")
        assert (answer.status_code, answer.text) == (200, "ok")
        assert node.sandboxes.asked == [("/a", "read", "", "v1_good", "99")]
        asked = len(node.sandboxes.asked)
        del node.sandboxes.signatures["v1_good"]  # as when its time is over
        answer = await client.get("/files?path=/a&signature=v1_good&signature_expiration=99")
        assert answer.status_code == 401
        assert len(node.sandboxes.asked) == asked + 1
        answer = await client.post("/files?path=/a&username=root&signature=v1_bad", content=b"x")
        assert answer.status_code == 401
        assert node.sandboxes.asked[-1] == ("/a", "write", "root", "v1_bad", None)
        answer = await client.get("/files")
        assert answer.json()["api"] == "/files"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: a\n\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"CONNECT / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 70_000, 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", 431),
    ],
)
@pytest.mark.parametrize("piece", [1 << 20, 1000, 1])
async def test_malformed_requests_end_the_connection(
    node: Node, request_bytes: bytes, status: int, piece: int
) -> None:
    piece = max(piece, len(request_bytes) // 1000)  # byte by byte is enough for the short ones
    async with node.client() as (reader, writer):
        for start in range(0, len(request_bytes), piece):
            writer.write(request_bytes[start : start + piece])
            await asyncio.sleep(0)
        writer.write(b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n")
        got, fields, body = await read_answer(reader)
        assert (got, fields["connection"], json.loads(body)["code"]) == (status, "close", status)
        assert await reader.read() == b""


async def test_a_malformed_chunk_on_the_way_to_a_guest(node: Node) -> None:
    ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            ended.set_result(await reader.read())
        except ConnectionError:
            ended.set_result(b"reset")

    port = await node.guest(guest)
    node.sandboxes.add("abc")
    async with node.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "POST", "Transfer-Encoding: chunked") + b"1\r\na\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"5\r\nabcdefgh\r\n0\r\n\r\n")
        assert (await read_answer(reader))[0] == 400
    assert not (await ended).endswith(b"0\r\n\r\n")


async def test_a_head_that_never_ends_is_ended(node: Node) -> None:
    node.limit(head_s=0.1)
    async with node.client() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n")
        assert (await read_answer(reader))[0] == 408
        assert await reader.read() == b""


async def test_an_idle_connection_is_closed_after_its_time(node: Node) -> None:
    node.limit(idle_s=0.1)
    async with node.client() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await read_answer(reader))[0] == 200
        assert await reader.read() == b""


async def test_an_unwanted_body_is_read_to_keep_the_connection(node: Node) -> None:
    async with node.client() as (reader, writer):
        writer.write(head_for("gone", 80, "/", "POST", "Content-Length: 500000"))
        assert (await read_answer(reader))[0] == 502
        writer.write(b"x" * 500_000)
        writer.write(b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n")
        assert json.loads((await read_answer(reader))[2])["api"] == "/next"


async def test_an_unwanted_body_without_end_is_not_read(node: Node) -> None:
    async with node.client() as (reader, writer):
        writer.write(head_for("gone", 80, "/", "POST", f"Content-Length: {1 << 30}"))
        status, fields, _ = await read_answer(reader)
        assert (status, fields["connection"]) == (502, "close")
        with pytest.raises(ConnectionError):
            for _ in range(1 << 14):
                writer.write(b"x" * 65536)
                await writer.drain()
