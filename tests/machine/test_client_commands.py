"""Commands that ask a server, as the program, about real sandboxes of a real node."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.api.models import ListedSandbox, SandboxDetail, SnapshotDetail
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

    def json(self, *words: str) -> Any:
        return json.loads(self(*words))

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


def test_a_life_at_the_terminal(aenv: Aenv) -> None:
    sandbox = aenv("start", "-d", "base", "--name", "mine", "--metadata", MARK).strip()
    (row,) = aenv.json("list", "--metadata", MARK)
    assert ListedSandbox.model_validate(row).sandboxID == sandbox
    assert SandboxDetail.model_validate(aenv.json("show", "mine")).state == "running"
    aenv("exec", "mine", "--", "sh", "-c", "echo first > /tmp/note")

    (made,) = aenv.json("snapshot", "create", "mine")
    snapshot = made["snapshotID"]
    aenv("exec", "mine", "--", "sh", "-c", "echo second > /tmp/note")
    children = aenv("fork", "mine", "2", "--number", "SEED", "--metadata", MARK, "--output", "ids").split()
    assert len(children) == 2
    said = [aenv("exec", child, "--", "sh", "-c", "echo $SEED; cat /tmp/note").split() for child in children]
    assert said == [["0", "second"], ["1", "second"]]
    assert aenv("delete", *children).split() == children

    assert aenv("rollback", "mine", snapshot[:9]).strip() == sandbox
    assert aenv("exec", "mine", "--", "cat", "/tmp/note") == "first\n"
    tree = aenv("snapshot", "tree", "mine", "--output", "table")
    assert f"{snapshot} *" in tree
    assert SnapshotDetail.model_validate(aenv.json("snapshot", "show", snapshot)).snapshotID == snapshot
    operations = [each["operation"] for each in aenv.json("operations", "mine")]
    assert "create" in operations

    assert aenv("pause", "mine").strip() == sandbox
    assert "paused" in aenv("pause", "mine", code=4)
    assert aenv("list", "--state", "paused", "--metadata", MARK, "--output", "ids").strip() == sandbox
    assert aenv("resume", "mine").strip() == sandbox
    assert aenv("exec", "mine", "--", "cat", "/tmp/note") == "first\n"
    assert "Sandbox paused" in aenv("logs", "mine")

    aenv("delete", "mine")
    assert "aenv list" in aenv("show", "mine", code=3)
    aenv("snapshot", "delete", snapshot)


def test_rules_and_figures_of_a_machine(aenv: Aenv) -> None:
    sandbox = aenv("start", "-d", "base", "--metadata", MARK, "--name", "ruled").strip()
    aenv("network", "set", "ruled", "--no-internet")
    assert aenv.json("network", "show", "ruled")["allowInternetAccess"] is False
    aenv("limits", "set", "ruled", "--iops", "500")
    assert aenv.json("limits", "show", "ruled")["disk"] == {"iops": 500}
    assert all(sample["memTotal"] > 0 for sample in aenv.json("metrics", "ruled"))
    assert aenv("timeout", "ruled", "100").strip() == sandbox

    with aenv.follow("list", "--watch", "--output", "ids", "--metadata", MARK) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline().strip() == sandbox
        aenv("pause", "ruled")
        assert watching.stdout.readline().strip() == sandbox  # again, because something happened
        watching.kill()
    about = ("events", "--sandbox", sandbox, "--kind", "paused", "--kind", "killed", "--after")
    lost, paused = [json.loads(line) for line in aenv(*about, "0-0", "--count", "2").splitlines()]
    assert (lost, paused["kind"]) == ({}, "paused")
    with aenv.follow(*about, paused["id"], "--count", "1") as events:
        aenv("delete", "ruled")
        said, _ = events.communicate(timeout=100)
    event = json.loads(said)
    assert (event["kind"], event["sandboxID"]) == ("killed", sandbox)


def test_a_data_directory_that_is_whole(node: RunningNode) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "agentenv", *words],
            env=node.environment,
            capture_output=True,
            text=True,
            timeout=100,
        )

    whole = run("fsck")
    assert (whole.returncode, [row for row in json.loads(whole.stdout) if row["snapshots"]]) == (0, [])
    refused = run("fsck", "--repair")
    assert refused.returncode == 4
    assert "aenv node stop" in refused.stderr
    shown = run("config", "show", "--set")
    rows = {row["name"]: row for row in json.loads(shown.stdout)}
    assert rows["home"]["value"] == str(node.home)
