"""The template `code-interpreter-v1`, built as a user builds it, with E2B's code interpreter clients. Long:
it installs packages under emulation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import npm
from support.running import RunningNode

client = pytest.importorskip("e2b_code_interpreter")

pytestmark = [
    pytest.mark.machine,
    pytest.mark.soak,
    pytest.mark.usefixtures("host_audit"),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("AENV_TEST_SOAK"), reason="long; scripts/test --soak runs it"),
]

HERE = Path(__file__).parent
# The host's own: packages may come through something that has certificates of its own.
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    """A node with the template."""
    node = node_factory("interpreter", ca_file=CERTIFICATES)
    subprocess.run(
        [sys.executable, "-m", "agentenv", "build", "code-interpreter-v1", "--verbose"],
        env={**node.environment, **node.client_environment},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return node


@pytest.fixture
def given(node: RunningNode) -> dict[str, Any]:
    return {"api_url": node.url, "sandbox_url": node.url, "api_key": node.key, "request_timeout": 120}


@pytest.fixture
def sandbox_of(given: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    made = []

    def make(**more: Any) -> Any:
        made.append(client.Sandbox.create(timeout=600, **given, **more))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.kill()


def test_code_of_all_languages(sandbox_of: Callable[..., Any]) -> None:
    sandbox = sandbox_of(envs={"COMMON": "to all"})
    listed = sandbox.list_code_contexts()
    assert sorted(each.language for each in listed) == ["javascript", "python"]
    assert sandbox.run_code("import os; os.getcwd()").text == "/home/user"
    assert sandbox.run_code("os.environ['COMMON']").text == "to all"
    assert sandbox.run_code("process.env.COMMON", language="js").text == "to all"
    assert sandbox.run_code("const n: number = 1 + 1; n", language="ts", timeout=300).text == "2"
    told = sandbox.run_code("echo $COMMON $OWN", language="bash", envs={"OWN": "one"}, timeout=300)
    assert told.logs.stdout == ["to all one\n"]
    assert sandbox.run_code("from collections import Counter; Counter('aab').most_common(1)").results[
        0
    ].json == [["a", 2]]


def test_output_as_it_comes_and_errors(sandbox_of: Callable[..., Any]) -> None:
    sandbox = sandbox_of()
    told: list[Any] = []
    execution = sandbox.run_code(
        "import sys, time\nprint('a'); time.sleep(0.5); print('b', file=sys.stderr); print('c'); 1/0",
        on_stdout=lambda message: told.append(message.line),
        on_stderr=lambda message: told.append(("err", message.line)),
        on_error=lambda error: told.append(error.name),
    )
    assert told[0] == "a\n"
    assert told[-1] == execution.error.name == "ZeroDivisionError"
    assert set(told[1:-1]) == {("err", "b\n"), "c\n"}
    assert "1/0" in execution.error.traceback
    assert sandbox.run_code("throw new Error('no')", language="js").error.value == "no"
    assert sandbox.run_code("1 + 1").text == "2"


def test_contexts(sandbox_of: Callable[..., Any]) -> None:
    sandbox = sandbox_of()
    context = sandbox.create_code_context(cwd="/tmp", request_timeout=300)
    assert sandbox.run_code("import os; x = 1; os.getcwd()", context=context).text == "/tmp"
    assert sandbox.run_code("x").error.name == "NameError"
    sandbox.restart_code_context(context)
    assert sandbox.run_code("x", context=context).error.name == "NameError"
    sandbox.remove_code_context(context)
    assert context.id not in [each.id for each in sandbox.list_code_contexts()]


def test_charts_and_data(sandbox_of: Callable[..., Any]) -> None:
    sandbox = sandbox_of()
    (shown,) = sandbox.run_code(
        "import matplotlib.pyplot as plt; plt.bar(['a', 'b'], [1, 2]); plt.title('T'); plt.show()"
    ).results
    assert (shown.chart.type, shown.chart.title, bool(shown.png)) == ("bar", "T", True)
    assert [(bar.label, bar.value) for bar in shown.chart.elements] == [("a", 1), ("b", 2)]
    (frame,) = sandbox.run_code("import pandas; pandas.DataFrame({'a': [1, 2]})").results
    assert frame.data == {"a": [1, 2]}
    assert "<table" in frame.html


def test_what_is_installed_is_found(sandbox_of: Callable[..., Any]) -> None:
    sandbox = sandbox_of()
    names = "bs4, numpy, openpyxl, PIL, requests, scipy.stats, seaborn, sympy"
    assert sandbox.run_code(f"import {names}; str(sympy.sqrt(8))", timeout=300).text == "2*sqrt(2)"
    done = sandbox.commands.run("pip install --no-cache-dir --no-compile six", timeout=300)
    assert "Successfully installed six" in done.stdout
    assert sandbox.run_code("import six; six.PY3").text == "True"


def test_state_goes_through_a_pause_and_into_forks(
    sandbox_of: Callable[..., Any], given: dict[str, Any]
) -> None:
    sandbox = sandbox_of()
    sandbox.run_code("import pandas; kept = pandas.Series([40, 2])")
    sandbox.run_code("let kept = 42", language="js")
    sandbox.run_code("KEPT=42", language="bash", timeout=300)
    sandbox.pause()
    again = client.Sandbox.connect(sandbox.sandbox_id, **given)
    children = again.fork(count=2)
    try:
        for number, each in enumerate([again, *children]):
            assert each.run_code(f"kept[2] = {number}; int(kept.sum())").text == str(42 + number)
            assert each.run_code("kept += 1", language="js").text == "43"
            assert each.run_code("echo $KEPT", language="bash").logs.stdout == ["42\n"]
    finally:
        for child in children:
            child.kill()


def test_sandboxes_are_no_twins(sandbox_of: Callable[..., Any]) -> None:
    """Each has its own variables, and its own random numbers."""
    drawn = set()
    for name in ("first", "second"):
        sandbox = sandbox_of(envs={"WHO": name})
        assert sandbox.run_code("import os; os.environ['WHO']").text == name
        code = "import random, numpy; print(random.random(), numpy.random.rand(), end='')"
        drawn.update(sandbox.run_code(code).logs.stdout[0].split())
    assert len(drawn) == 4


def test_the_javascript_client(node: RunningNode, tmp_path: Path) -> None:
    packages = npm.install(tmp_path, "@e2b/code-interpreter")
    done = subprocess.run(
        [npm.PROGRAMS / "node", "--test", "--test-reporter=tap", HERE / "code_interpreter.test.mjs"],
        env={**os.environ, **node.client_environment, "AENV_TEST_NPM": str(packages)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^# pass (\d+)", done.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) == 4, done.stdout
