"""Two teams with keys of their own on one real node, through E2B's SDK and our command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox
from e2b.exceptions import AuthenticationException, NotFoundException, RateLimitException

from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]


def aenv(node: RunningNode, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "agentenv", *arguments],
        env={**node.environment, **node.client_environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def teams(node: RunningNode) -> Iterator[dict[str, str]]:
    """Two keys by their names; blue's team may have one sandbox."""
    made = {
        "team-blue": aenv(node, "key", "create", "team-blue", "--project", "blue", "--sandboxes", "1"),
        "team-red": aenv(node, "key", "create", "team-red", "--project", "red"),
    }
    yield made
    aenv(node, "key", "revoke", *made)


def options(node: RunningNode, key: str) -> dict[str, Any]:
    return {"api_key": key, "api_url": node.url, "sandbox_url": node.url, "request_timeout": 120}


def traces_of(node: RunningNode, secrets: list[str]) -> list[str]:
    """Where on the host one of them is in the clear: processes' words and variables, the node's files."""
    files = [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]
    files += [path for path in node.home.rglob("*") if path.is_file() and path.stat().st_size < 64 << 20]
    found = []
    for path in [*files, node.log]:
        try:
            content = path.read_bytes()
        except OSError:  # a process that has ended
            continue
        found += [str(path) for secret in secrets if secret.encode() in content]
    return found


def test_teams_are_apart(node: RunningNode, teams: dict[str, str]) -> None:
    blue, red = options(node, teams["team-blue"]), options(node, teams["team-red"])
    sandbox = Sandbox.create("base", timeout=120, **blue)
    try:
        assert sandbox.commands.run("echo mine").stdout == "mine\n"
        with pytest.raises(NotFoundException):
            Sandbox.connect(sandbox.sandbox_id, **red)
        assert Sandbox.kill(sandbox.sandbox_id, **red) is False
        assert Sandbox.list(**red).next_items() == []
        assert [each.sandbox_id for each in Sandbox.list(**blue).next_items()] == [sandbox.sandbox_id]
        with pytest.raises(RateLimitException, match="1 sandboxes: 1 are taken"):
            Sandbox.create("base", **blue)
        assert traces_of(node, [*teams.values()]) == []
    finally:
        assert sandbox.kill()
    again = aenv(node, "key", "rotate", "team-blue")
    with pytest.raises(AuthenticationException):
        Sandbox.list(**blue).next_items()
    assert Sandbox.list(**options(node, again)).next_items() == []
    shown = aenv(node, "key", "list")
    assert "team-blue" in shown
    assert again not in shown
