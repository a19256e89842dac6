"""The wheel as a user gets it: built, and installed by pip into an environment that has nothing else.

It takes a while, and is worth it: that the client's dependencies are named, and those of a node are not
needed, shows only where neither the source tree nor the tests' packages are to be found. pip takes its
packages from where it is configured to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AENV_"))}
    return subprocess.run(
        command, env={**kept, **env}, cwd="/", capture_output=True, text=True, check=False, timeout=240
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, without an extra."""
    place = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    done = run(*pip, "wheel", "--no-deps", "--wheel-dir", place, ROOT, TMPDIR=str(place))
    assert done.returncode == 0, done.stderr
    [wheel] = place.glob("agentenv_server-*.whl")
    assert run(sys.executable, "-m", "venv", "--without-pip", place / "env").returncode == 0
    done = run(*pip, "--python", place / "env/bin/python", "install", "--no-compile", wheel)
    assert done.returncode == 0, done.stderr
    return place / "env/bin"


def test_the_client_works_and_a_node_says_what_it_lacks(installed: Path) -> None:
    version = run(installed / "aenv", "--version")
    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout.startswith("aenv, version ")
    shown = run(installed / "aenv", "--help")
    assert "Commands:" in shown.stdout
    loaded = run(
        installed / "python",
        *(
            "-c",
            "import agentenv; print(agentenv.Sandbox.fork.__doc__, agentenv.AsyncSandbox, agentenv.Limits())",
        ),
    )
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert "Start children that go on" in loaded.stdout
    refused = run(installed / "aenv", "serve")
    assert refused.returncode == 6
    assert "pip install 'agentenv-server[server]'" in refused.stderr


def test_a_dockerfile_is_read_without_the_packages_of_a_node(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM alpine:3.20\nRUN echo hello\n")
    away = ("--url", "http://127.0.0.1:9", "--api-key", "none")  # nobody listens there
    done = run(installed / "aenv", "build", tmp_path, "--name", "one", *away)
    assert done.returncode != 0
    assert "does not answer" in done.stderr, done.stderr
