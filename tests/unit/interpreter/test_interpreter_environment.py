"""The sandbox's variables, asked of a stand-in of the agent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from agentenv.interpreter.environment import Environment


class Agent:
    """Answers with `told`, and counts how often it was asked."""

    def __init__(self) -> None:
        self.told: object = {"A": "1"}
        self.tokens: list[str | None] = []
        self.url = ""


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            agent.tokens.append(self.headers.get("X-Access-Token"))
            body = json.dumps(agent.told).encode() if agent.told is not None else b"no"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        agent.url = f"http://127.0.0.1:{server.server_address[1]}/envs"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield agent
        server.shutdown()
        thread.join()


async def test_asked_once_for_each_sandbox(agent: Agent, tmp_path: Path) -> None:
    identity = tmp_path / "id"
    identity.write_text("one")
    environment = Environment(agent.url, identity)
    assert await environment.variables("t") == await environment.variables("t") == {"A": "1"}
    assert agent.tokens == ["t"]
    identity.write_text("two")  # a fork, or the first sandbox of a template
    agent.told = {"A": 2}
    assert await environment.variables("t") == {"A": "2"}
    assert await environment.variables(None) == {"A": "2"}
    assert agent.tokens == ["t", "t", None]


async def test_no_agent_is_no_variables_and_is_asked_again(agent: Agent, tmp_path: Path) -> None:
    assert await Environment("http://127.0.0.1:9/envs", tmp_path / "none").variables("t") == {}
    environment = Environment(agent.url, tmp_path / "none")
    agent.told = None
    assert await environment.variables("t") == {}
    agent.told = {"A": "1"}
    assert await environment.variables("t") == {"A": "1"}
