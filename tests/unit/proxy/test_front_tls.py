"""The front behind TLS: what is the same as in the clear, and what is not."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect as connect_websocket
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from agentenv.tls import authority
from agentenv.tls.endpoint import Endpoint
from agentenv.tls.serving import Local, Served
from support.front_node import Node, head_for, read_answer, read_head

DOMAIN = "box.test"


@dataclass(frozen=True)
class Secure:
    """A front that takes TLS as well."""

    node: Node
    endpoint: Endpoint
    directory: Path

    def context(self) -> ssl.SSLContext:
        """A client's, which trusts the authority."""
        return ssl.create_default_context(cafile=self.directory / authority.CERTIFICATE)

    @asynccontextmanager
    async def client(
        self, context: ssl.SSLContext | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.endpoint.port, ssl=context or self.context(), server_hostname=f"80-x.{DOMAIN}"
        )
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


@pytest.fixture
async def secure(node: Node, tmp_path: Path) -> Secure:
    authority.establish(tmp_path / "tls", DOMAIN)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.setblocking(False)
    endpoint = Endpoint(listener, Served(Local(tmp_path / "tls", DOMAIN), DOMAIN))
    config, state = node.server.config, node.server.server_state
    node.server.servers.append(await endpoint.listen(lambda: node.front(config, state, {}), 16))
    return Secure(node, endpoint, tmp_path / "tls")


async def shows_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        head = await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(head), head))


async def test_requests_to_the_api_and_to_sandboxes(secure: Secure) -> None:
    port = await secure.node.guest(shows_head)
    secure.node.sandboxes.add("abc")
    context = secure.context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with secure.client(context) as (reader, writer):
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        for _ in range(2):
            writer.write(b"GET /sandboxes HTTP/1.1\r\nHost: api.box.test:8443\r\n\r\n")
            assert b'"/sandboxes"' in (await read_answer(reader))[2]
            writer.write(f"GET /x HTTP/1.1\r\nHost: {port}-abc.box.test:8443\r\n\r\n".encode())
            body = (await read_answer(reader))[2]
            assert b"X-Forwarded-Proto: https\r\n" in body
            assert b"Host: %d-abc.box.test:8443\r\n" % port in body


async def test_bodies_pass_both_ways(secure: Secure) -> None:
    size = 6 << 20

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        left = size
        while left:
            data = await reader.read(1 << 17)
            left -= len(data)
            writer.write(data)
            await writer.drain()
        await reader.read()

    port = await secure.node.guest(echo)
    secure.node.sandboxes.add("abc")
    body = bytes(range(256)) * (size // 256)
    async with secure.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "POST", f"Content-Length: {size}"))
        sending = asyncio.create_task(_send(writer, body))
        await read_head(reader)
        assert await reader.readexactly(size) == body
        await sending


async def _send(writer: asyncio.StreamWriter, body: bytes) -> None:
    for start in range(0, len(body), 1 << 18):
        writer.write(body[start : start + (1 << 18)])
        await writer.drain()


async def test_a_websocket(secure: Secure) -> None:
    async def echo(connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    secure.node.sandboxes.add("abc")
    async with serve(echo, "127.0.0.1", 0, subprotocols=[Subprotocol("chat")]) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with connect_websocket(
            f"wss://{port}-abc.{DOMAIN}/",
            host="127.0.0.1",
            port=secure.endpoint.port,
            ssl=secure.context(),
            subprotocols=[Subprotocol("chat")],
        ) as client:
            assert client.subprotocol == "chat"
            for message in ("a", b"\x00" * 300_000):
                await client.send(message)
                assert await client.recv() == message


async def test_a_slow_reader_stops_the_guest(secure: Secure) -> None:
    written, stopped = 0, asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 268435456\r\n\r\n")
        writer.transport.set_write_buffer_limits(high=0)
        while True:
            writer.write(b"x" * 65536)
            written += 65536
            try:
                await asyncio.wait_for(writer.drain(), 0.5)
            except TimeoutError:
                stopped.set()
                raise asyncio.CancelledError from None

    port = await secure.node.guest(flood)
    secure.node.sandboxes.add("abc")
    async with secure.client() as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head_for("abc", port))
        await stopped.wait()
        assert written < 64 << 20


async def test_the_end_of_a_machine_is_no_proper_end(secure: Secure) -> None:
    async def begins(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nhalf")
        await reader.read()

    port = await secure.node.guest(begins)
    secure.node.sandboxes.add("abc")
    loop = asyncio.get_running_loop()
    client = secure.context().wrap_socket(
        socket.socket(), server_hostname=f"1-x.{DOMAIN}", do_handshake_on_connect=False
    )
    with client:
        client.settimeout(20)
        await loop.run_in_executor(None, client.connect, ("127.0.0.1", secure.endpoint.port))
        await loop.run_in_executor(None, client.do_handshake)
        await loop.run_in_executor(None, client.sendall, head_for("abc", port))
        got = b""
        while not got.endswith(b"half"):
            got += await loop.run_in_executor(None, client.recv, 1000)
        del secure.node.sandboxes.routes["abc"]
        secure.node.plane.abort("abc", 1)
        with pytest.raises(ConnectionResetError):  # below TLS, whose end alone many clients do not miss
            await loop.run_in_executor(None, socket.socket.recv, client, 1000)


async def test_a_guest_that_closes_its_half_ends_a_tunnel(secure: Secure) -> None:
    """Half of a TLS connection cannot be closed here: the client would wait for ever for an end."""

    async def raw(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\nlast")
        writer.write_eof()
        await reader.read()

    port = await secure.node.guest(raw)
    secure.node.sandboxes.add("abc")
    async with secure.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "GET", "Connection: Upgrade", "Upgrade: raw"))
        await read_head(reader)
        assert await reader.read() == b"last"


async def test_what_a_client_sent_before_its_end_arrives(secure: Secure) -> None:
    said: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def raw(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n")
        said.set_result(await reader.read())

    port = await secure.node.guest(raw)
    secure.node.sandboxes.add("abc")
    async with secure.client() as (reader, writer):
        writer.write(head_for("abc", port, "/", "GET", "Connection: Upgrade", "Upgrade: raw"))
        await read_head(reader)
        writer.write(b"z" * 300_000)
        writer.close()
        assert len(await said) == 300_000


async def test_an_answer_comes_before_the_end_although_the_body_goes_on(secure: Secure) -> None:
    async with secure.client() as (reader, writer):
        writer.write(head_for("gone", 80, "/", "POST", f"Content-Length: {1 << 30}"))
        writer.write(b"x" * 2_000_000)
        status, fields, _ = await read_answer(reader)
        assert (status, fields["connection"]) == (502, "close")


async def test_another_certificate_is_served_and_connections_go_on(secure: Secure) -> None:
    async with secure.client() as (reader, writer):
        before = writer.get_extra_info("ssl_object").getpeercert(True)
        (secure.directory / authority.LEAF).unlink()
        assert secure.endpoint.served.refresh() is True
        async with secure.client() as (_, later):
            assert later.get_extra_info("ssl_object").getpeercert(True) != before
        writer.write(b"GET /still HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b'"/still"' in (await read_answer(reader))[2]


async def test_other_tongues_do_no_harm(secure: Secure, caplog: pytest.LogCaptureFixture) -> None:
    for said in (
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x00" * 100,
        b"\x16\x03\x01\x40\x00" + b"x" * 100,
        b"",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", secure.endpoint.port)
        writer.write(said)
        writer.write_eof()
        await reader.read()  # an alert, or nothing
        writer.close()
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    async with httpx.AsyncClient(verify=secure.context()) as client:
        answer = await client.get(f"https://localhost:{secure.endpoint.port}/fine")
    assert answer.json()["api"] == "/fine"
    assert datetime.now(UTC) < authority.end_of((secure.directory / authority.LEAF).read_bytes())
