"""E2B's command, the unmodified `@e2b/cli` from npm: what people type every day."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support import npm
from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

LIMIT_S = 120.0
PROMPT = b"$ "

E2b = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    packages = npm.install(tmp_path_factory.mktemp("npm-cli"), "@e2b/cli")
    return [str(npm.PROGRAMS / "node"), str(packages / "node_modules/@e2b/cli/dist/index.js")]


@pytest.fixture
def environment(node: RunningNode, tmp_path: Path) -> dict[str, str]:
    return {**os.environ, **node.client_environment, "HOME": str(tmp_path), "NO_COLOR": "1"}


@pytest.fixture
def e2b(command: list[str], environment: dict[str, str]) -> E2b:
    def run(*arguments: str, given: str = "", status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*command, *arguments],
            env=environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


def test_the_life_of_a_sandbox(e2b: E2b, command: list[str], environment: dict[str, str]) -> None:
    sandbox = e2b("sandbox", "create", "base", "--detach").stdout.strip()
    try:
        listed = json.loads(e2b("sandbox", "list", "--format", "json").stdout)  # with the shared one
        shown = {entry["sandboxId"]: (entry["name"], entry["state"]) for entry in listed}
        assert shown[sandbox] == ("base", "running")
        arguments = ("-u", "root", "-c", "/tmp", "-e", "A=1", sandbox, "id -u; pwd; echo $A; exit 3")
        assert e2b("sandbox", "exec", *arguments, status=3).stdout == "0\n/tmp\n1\n"
        assert e2b("sandbox", "exec", sandbox, "cat", given="piped").stdout == "piped"
        assert b"me-user" in in_terminal(
            [*command, "sandbox", "connect", sandbox], environment, "echo me-$(whoami)", "exit"
        )
        lines = e2b("sandbox", "logs", sandbox, "--format", "json").stdout.splitlines()
        assert "Sandbox created" in [json.loads(line)["message"] for line in lines if line.startswith("{")]
        lines = e2b("sandbox", "metrics", sandbox, "--format", "json").stdout.splitlines()
        assert [json.loads(line)["cpuCount"] for line in lines if line.startswith("{")][-1] == 1
        e2b("sandbox", "pause", sandbox)
        assert sandbox in e2b("sandbox", "list", "--state", "paused").stdout
        e2b("sandbox", "resume", sandbox)
    finally:
        assert "has been killed" in e2b("sandbox", "kill", sandbox).stdout


def test_templates(e2b: E2b, node: RunningNode, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("content")
    (tmp_path / "Dockerfile").write_text("FROM template://base\nCOPY a.txt /srv/\nRUN cp /srv/a.txt /srv/b\n")
    sizes = ("--cpu-count", "1", "--memory-mb", "512")
    built = e2b("template", "create", "by-command", "--path", str(tmp_path), *sizes)
    assert "Building sandbox template by-command finished" in built.stdout
    assert "by-command" in e2b("template", "list").stdout
    e2b("template", "delete", "by-command", "--yes")
    with node.client() as client:
        assert client.get("/templates/aliases/by-command").status_code == 404


def in_terminal(command: list[str], environment: dict[str, str], *lines: str) -> bytes:
    """What a terminal showed in which the command ran and, at each prompt, the next line was typed."""
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, seen, typed, limit = b"", 0, [*lines], time.monotonic() + LIMIT_S
    while select.select([terminal], [], [], max(0.0, limit - time.monotonic()))[0]:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        shown += data
        if typed and PROMPT in shown[seen:]:
            seen = len(shown)
            os.write(terminal, typed.pop(0).encode() + b"\r")
    os.close(terminal)
    assert process.wait(LIMIT_S) == 0, shown
    return shown
