"""Commands of a user who has logged in at a real node, and follows what happens there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

MARK = "test=commands"


class Aenv:
    """Runs `aenv` for a user who has logged in at the node, from anywhere."""

    def __init__(self, node: RunningNode, config: Path) -> None:
        gone = ("AENV_", "E2B_")
        self.environment = {
            **{name: value for name, value in node.environment.items() if not name.startswith(gone)},
            "XDG_CONFIG_HOME": str(config),
        }

    def __call__(self, *words: str, code: int = 0, given: str | None = None) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "agentenv", *words],
            env=self.environment,
            input=given or "",
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout if code == 0 else done.stderr

    def follow(self, *words: str) -> subprocess.Popen[str]:
        """One that goes on; the caller ends it."""
        return subprocess.Popen(
            [sys.executable, "-m", "agentenv", *words],
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def aenv(node: RunningNode, tmp_path: Path) -> Iterator[Aenv]:
    run = Aenv(node, tmp_path)
    run("auth", "login", node.url, given=f"{node.key}\n")
    yield run
    run("delete", "--metadata", MARK, "--yes")


def test_what_happens_is_followed(aenv: Aenv) -> None:
    sandbox = aenv("start", "-d", "base", "--metadata", MARK, "--name", "followed").strip()
    with aenv.follow("list", "--watch", "--output", "ids", "--metadata", MARK) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline().strip() == sandbox
        aenv("pause", "followed")
        assert watching.stdout.readline().strip() == sandbox  # again, because something happened
        watching.kill()
    about = ("events", "--sandbox", sandbox, "--kind", "paused", "--kind", "killed", "--after")
    lost, paused = [json.loads(line) for line in aenv(*about, "0-0", "--count", "2").splitlines()]
    assert (lost, paused["kind"]) == ({}, "paused")
    with aenv.follow(*about, paused["id"], "--count", "1") as events:
        aenv("delete", "followed")
        said, _ = events.communicate(timeout=100)
    event = json.loads(said)
    assert (event["kind"], event["sandboxID"]) == ("killed", sandbox)
