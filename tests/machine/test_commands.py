"""The real program against a real node: a sandbox's life at the terminal."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

Aenv = Callable[..., str]


@pytest.fixture
def aenv(node: RunningNode) -> Aenv:
    def run(*arguments: str, status: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "agentenv", *arguments],
            env={**node.environment, **node.client_environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout.strip() if status == 0 else done.stderr

    return run


def test_a_life_at_the_terminal(aenv: Aenv, tmp_path: Path) -> None:
    sandbox = aenv("start", "base", "-d", "--name", "terminal", "--metadata", "run=cli")
    try:
        assert aenv("exec", "terminal", "echo hello from $(whoami)") == "hello from user"
        assert aenv("exec", "terminal", "false", status=1) == ""
        point = aenv("snapshot", "create", "terminal", "--name", "terminal-point", "--output", "ids")
        aenv("exec", "terminal", "touch mark")
        assert aenv("pause", "terminal") == sandbox
        assert aenv("list", "--state", "paused", "--metadata", "run=cli", "--output", "ids") == sandbox
        assert aenv("resume", sandbox[:10]) == sandbox
        assert aenv("exec", "terminal", "ls") == "mark"
        assert aenv("rollback", "terminal", point) == sandbox
        assert aenv("exec", "terminal", "ls") == ""
        aenv("fork", "terminal", "2", "--number", "SEED")
        seeds = [aenv("exec", child, "echo $SEED") for child in ("terminal-1", "terminal-2")]
        assert seeds == ["0", "1"]
        messages = [json.loads(line)["message"] for line in aenv("logs", "terminal").splitlines()]
        assert "Sandbox created" in messages
        (tmp_path / "file").write_text("content")
        aenv("cp", str(tmp_path / "file"), "terminal:/home/user/")
        aenv("download", "terminal", "/home/user/file", str(tmp_path / "back"))
        assert (tmp_path / "back").read_text() == "content"
        aenv("network", "set", "terminal", "--no-internet")
        assert json.loads(aenv("network", "show", "terminal"))["allowInternetAccess"] is False
        while not json.loads(found := aenv("metrics", "terminal")):
            time.sleep(0.5)  # the node takes a sample every few seconds
        assert json.loads(found)[-1]["memTotal"] > 100 << 20
        phases = json.loads(aenv("operations", "terminal"))
        assert {"pause", "resume", "rollback"} <= {each["operation"] for each in phases}
        told = aenv("show", "no-such-one", status=3)
        assert told == 'aenv: there is no sandbox "no-such-one"\n  try: `aenv list` shows them\n'
        assert aenv("snapshot", "delete", "terminal-point") == point
    finally:
        gone = aenv("delete", "--metadata", "run=cli", "--yes").split()
    assert len(gone) == 3
    assert json.loads(aenv("fsck")) == []
    assert "aenv node stop" in aenv("fsck", "--repair", status=4)
