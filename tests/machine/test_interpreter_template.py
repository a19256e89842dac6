"""The template `code-interpreter-v1`, built from its Dockerfile, with E2B's code interpreter client. Long: it
installs packages under emulation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import agentenv
from support.running import RunningNode

client = pytest.importorskip("e2b_code_interpreter")

pytestmark = [
    pytest.mark.machine,
    pytest.mark.soak,
    pytest.mark.usefixtures("host_audit"),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("AENV_TEST_SOAK"), reason="long; scripts/test --soak runs it"),
]

DEFINITION = Path(agentenv.__file__).parent / "interpreter"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# The host's own certificates: packages may come through something that has one of its own.
BASE = """\
FROM template://base
USER root
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
USER user
"""


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode], tmp_path_factory: pytest.TempPathFactory) -> RunningNode:
    """A node with the template."""
    node = node_factory("interpreter")
    below = tmp_path_factory.mktemp("below")
    (below / "Dockerfile").write_text(BASE)
    shutil.copy(CERTIFICATES, below)
    build(node, below, "--name", "with-certificates")
    resources = ("--cpu", "2", "--memory", "2048", "--build-arg", "BASE=template://with-certificates")
    build(node, DEFINITION, "--name", "code-interpreter-v1", *resources)
    return node


def build(node: RunningNode, context: Path, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "agentenv", "build", str(context), *arguments],
        env={**node.environment, **node.client_environment},
        stdin=subprocess.DEVNULL,
        check=True,
    )


@pytest.fixture
def sandbox_of(node: RunningNode) -> Iterator[Callable[..., Any]]:
    made = []

    def make(**more: Any) -> Any:
        given = {"api_url": node.url, "sandbox_url": node.url, "api_key": node.key, "timeout": 600}
        made.append(client.Sandbox.create(**given, request_timeout=120, **more))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.kill()


def test_code_of_all_languages(sandbox_of: Callable[..., Any]) -> None:
    sandbox = sandbox_of(envs={"COMMON": "to all"})
    assert sandbox.run_code("import os; os.getcwd()").text == "/home/user"
    assert sandbox.run_code("os.environ['COMMON']").text == "to all"
    assert sandbox.run_code("process.env.COMMON", language="js").text == "to all"
    assert sandbox.run_code("const n: number = 1 + 1; n", language="ts").text == "2"
    assert sandbox.run_code("echo $COMMON $OWN", language="bash", envs={"OWN": "one"}).logs.stdout == [
        "to all one\n"
    ]
    assert {each.language for each in sandbox.list_code_contexts()} >= {"python", "javascript"}


def test_charts_and_data(sandbox_of: Callable[..., Any]) -> None:
    sandbox = sandbox_of()
    chart = sandbox.run_code("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.title('T'); plt.show()")
    assert (chart.results[0].chart.title, bool(chart.results[0].png)) == ("T", True)
    frame = sandbox.run_code("import pandas; pandas.DataFrame({'a': [1, 2]})")
    assert frame.results[0].data == {"a": [1, 2]}


def test_state_goes_through_a_pause(sandbox_of: Callable[..., Any], node: RunningNode) -> None:
    sandbox = sandbox_of()
    sandbox.run_code("kept = 42")
    sandbox.pause()
    again = client.Sandbox.connect(
        sandbox.sandbox_id, api_url=node.url, sandbox_url=node.url, api_key=node.key, request_timeout=120
    )
    assert again.run_code("kept").text == "42"


def test_a_fork_has_its_own_variables(sandbox_of: Callable[..., Any]) -> None:
    sandbox = sandbox_of(envs={"WHO": "first"})
    assert sandbox.run_code("import os; os.environ['WHO']").text == "first"
    other = sandbox_of(envs={"WHO": "second"})
    assert other.run_code("import os; os.environ['WHO']").text == "second"
