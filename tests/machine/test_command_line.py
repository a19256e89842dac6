"""The `aenv` command as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from support.home import linked_home
from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

Aenv = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def aenv(node_directory: Path) -> Iterator[Aenv]:
    """Runs `aenv` with a data directory of its own; the node in it ends with the test."""
    home = linked_home(node_directory / "cli")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("AENV_", "E2B_"))},
        "AENV_HOME": str(home),
        "AENV_RUNTIME": f"/run/aenv-t-{os.getpid()}-cli",
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "agentenv", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )

    yield run
    stopped = run("node", "stop")
    assert stopped.returncode == 0, stopped.stderr
    subprocess.run(["rm", "-rf", str(home)], check=True)


def exports(text: str) -> dict[str, str]:
    return dict(line.removeprefix("export ").split("=", 1) for line in text.splitlines())


def test_a_node_in_the_background(aenv: Aenv) -> None:
    assert aenv("node", "status").returncode == 3
    no_node = aenv("env")
    assert (no_node.returncode, no_node.stdout) == (4, "")
    assert "aenv node start" in no_node.stderr

    started = aenv("node", "start", "--port", "0")
    assert started.returncode == 0, started.stderr
    assert "already running" in aenv("node", "start").stdout
    status = json.loads(aenv("node", "status", "--output", "json").stdout)
    assert (status["running"], status["sandboxes"]) == (True, 0)

    variables = exports(aenv("env").stdout)
    assert sorted(variables) == ["E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL"]
    assert variables["E2B_API_KEY"].startswith("e2b_")
    sandbox = Sandbox.create(
        "base",
        timeout=300,
        request_timeout=120,
        api_url=variables["E2B_API_URL"],
        sandbox_url=variables["E2B_SANDBOX_URL"],
        api_key=variables["E2B_API_KEY"],
    )
    sandbox.commands.run("echo kept > note")

    restarted = aenv("node", "restart")
    assert restarted.returncode == 0, restarted.stderr
    assert exports(aenv("env").stdout) == variables
    assert sandbox.commands.run("cat note").stdout == "kept\n"

    in_use = aenv("template", "delete", "base")
    assert in_use.returncode == 4
    assert "used by 1 sandbox" in in_use.stderr

    stopped = aenv("node", "stop")
    assert "paused 1 sandbox\n" in stopped.stdout, stopped.stderr
    assert aenv("node", "status").returncode == 3
    assert aenv("node", "start", "--port", variables["E2B_API_URL"].rpartition(":")[2]).returncode == 0
    assert sandbox.connect().commands.run("cat note").stdout == "kept\n"
    assert sandbox.kill() is True
    assert "paused 0 sandboxes\n" in aenv("node", "stop").stdout
    deleted = aenv("template", "delete", "base")
    assert deleted.returncode == 0, deleted.stderr
    assert aenv("template", "list", "--names").stdout == ""


def test_two_nodes_side_by_side(aenv: Aenv, node: RunningNode) -> None:
    assert aenv("node", "start", "--port", "0").returncode == 0
    variables = exports(aenv("env").stdout)
    assert variables["E2B_API_URL"] != node.url
    other = httpx.get(
        f"{variables['E2B_API_URL']}/v2/sandboxes",
        headers={"X-API-KEY": variables["E2B_API_KEY"]},
        trust_env=False,
    )
    assert other.json() == []
    wrong_key = httpx.get(
        f"{node.url}/v2/sandboxes", headers={"X-API-KEY": variables["E2B_API_KEY"]}, trust_env=False
    )
    assert wrong_key.status_code == 401


def test_setup_again_changes_nothing(aenv: Aenv) -> None:
    assert aenv("setup").returncode == 0  # the tests' copy of the data directory lacks some directories
    again = aenv("setup")
    assert again.returncode == 0, again.stderr
    lines = [line for line in again.stderr.splitlines() if "]" in line and "accelerator" not in line]
    assert lines
    assert all("unchanged" in line for line in lines), again.stderr


def test_doctor_lists_capabilities(aenv: Aenv) -> None:
    shown = aenv("doctor", "--output", "json")
    assert shown.returncode == 0, shown.stdout
    capabilities = {item["name"]: item for item in json.loads(shown.stdout)["capabilities"]}
    for name in (
        "kvm",
        "qemu",
        "tun",
        "nftables",
        "network namespaces",
        "fuse",
        "cgroups",
        "reflink",
        "memory",
    ):
        assert capabilities[name]["status"] in ("ok", "degraded", "missing")
        assert capabilities[name]["why"]
    assert capabilities["qemu"]["status"] == "ok"
