"""Requests through a real front: to the API, to guests, one after the other on one connection."""

from __future__ import annotations

import asyncio
import json

import httpx

from support.front_node import Node, head_for, read_answer, read_head


async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers each request on a connection with its own head as the body."""
    while True:
        head = await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(head), head))


async def test_api_requests_reach_the_api(node: Node) -> None:
    async with httpx.AsyncClient(base_url=node.url) as client:
        for _ in range(3):
            answer = await client.post("/sandboxes", content=b"x" * 100_000)
            assert answer.json() == {"api": "/sandboxes", "method": "POST", "bytes": 100_000}


async def test_one_connection_serves_the_api_and_several_sandboxes(node: Node) -> None:
    ports = {name: await node.guest(hello) for name in ("one", "two")}
    for name in ports:
        node.sandboxes.add(name)
    async with node.client() as (reader, writer):
        for _ in range(2):
            for name, port in ports.items():
                writer.write(head_for(name, port, "/a//b%2f?q=1"))
                status, _, body = await read_answer(reader)
                assert status == 200
                assert body.startswith(b"GET /a//b%2f?q=1 HTTP/1.1\r\n")
                assert b"E2b-Sandbox-Id: " + name.encode() in body
            writer.write(b"GET /api HTTP/1.1\r\nHost: localhost\r\n\r\n")
            status, _, body = await read_answer(reader)
            assert json.loads(body)["api"] == "/api"
