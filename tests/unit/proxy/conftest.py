"""Every test here runs on both event loops: the plain one, and uvloop, which serves in production."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvicorn
import uvloop

from agentenv.config import Settings
from agentenv.proxy.front import front_protocol
from support.front_node import API_KEY, Node, QuietServer, Sandboxes, api


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def may_forward(secret: bytes, sandbox_id: str) -> bool | None:
    return True if secret == API_KEY.encode() else None


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    sandboxes = Sandboxes()
    front = front_protocol(sandboxes, Settings(domain="box.test:8000"), may_forward)
    config = uvicorn.Config(
        api, host="127.0.0.1", port=0, http=front, ws="websockets-sansio", lifespan="off", log_config=None
    )
    server = QuietServer(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    running = Node(port, sandboxes, front, server, front.plane, serving)
    yield running
    await running.close()
