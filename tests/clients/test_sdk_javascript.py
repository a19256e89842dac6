"""The unmodified `e2b` package from npm, run by a Node from a Python package."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from support import npm
from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

HERE = Path(__file__).parent


def test_the_javascript_sdk(node: RunningNode, npm_packages: Path) -> None:
    done = subprocess.run(
        [npm.PROGRAMS / "node", "--test", "--test-reporter=tap", HERE / "sdk.test.mjs"],
        env={**os.environ, **node.client_environment, "AENV_TEST_NPM": str(npm_packages)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^# pass (\d+)", done.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) == 7, done.stdout
