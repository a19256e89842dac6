"""E2B's code interpreter client, unmodified, against the server with real kernels and no machine around."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import NotFoundException, SandboxException, TimeoutException

client = pytest.importorskip("e2b_code_interpreter")
pytest.importorskip("ipykernel")

START_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def process(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """The server on loopback."""
    home = tmp_path_factory.mktemp("home")
    host, _, port = address.partition(":")
    arguments = ["--host", host, "--port", port, "--home", str(home)]
    environment = {**os.environ, "IPYTHONDIR": str(home / ".ipython"), "MPLCONFIGDIR": str(home)}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "agentenv.interpreter", *arguments],
        env=environment,
        stderr=subprocess.DEVNULL,
    ) as started:
        try:
            wait_for(f"http://{address}/health", started)
            yield started
        finally:
            started.terminate()
    assert started.returncode == -signal.SIGTERM  # raised again, as uvicorn does, after a clean end


@pytest.fixture(scope="module")
def sandbox(process: subprocess.Popen[bytes], address: str) -> Any:
    """A client whose sandbox is the server (the client's debug mode)."""
    return client.Sandbox.create(debug=True, api_key="e2b_00", sandbox_url=f"http://{address}")


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < limit, "the server does not answer"
            time.sleep(0.1)


def test_nobody_was_there_before(sandbox: Any, address: str) -> None:
    """First: what the kernel did to be ready, and to be quick, does not show."""
    rehearsed = urllib.request.Request(f"http://{address}/rehearse", method="POST")
    with urllib.request.urlopen(rehearsed, timeout=60) as answer:
        assert b"end_of_execution" in answer.read()
    execution = sandbox.run_code("[name for name in dir() if not name.startswith('_')]")
    assert execution.execution_count == 1
    assert execution.results[0].json == ["In", "Out", "exit", "get_ipython", "open", "quit"]
    loaded = sandbox.run_code("import sys; 'matplotlib.pyplot' in sys.modules").results[0].text
    assert loaded == str(importlib.util.find_spec("matplotlib") is not None)


def test_results_and_state(sandbox: Any) -> None:
    sandbox.run_code("x = 20")
    execution = sandbox.run_code("x += 1; x * 2")
    assert execution.text == "42"
    assert execution.results[0].is_main_result
    assert sandbox.run_code("'it is text'").text == "it is text"


def test_output_as_it_comes(sandbox: Any) -> None:
    out: list[str] = []
    err: list[str] = []
    execution = sandbox.run_code(
        "import sys; print('out'); print('err', file=sys.stderr)",
        on_stdout=lambda message: out.append(message.line),
        on_stderr=lambda message: err.append(message.line),
    )
    assert "".join(out) == "".join(execution.logs.stdout) == "out\n"
    assert "".join(err) == "err\n"


def test_errors(sandbox: Any) -> None:
    execution = sandbox.run_code("1/0")
    assert (execution.error.name, execution.error.value) == ("ZeroDivisionError", "division by zero")
    assert "\x1b[" not in execution.error.traceback
    assert "1/0" in execution.error.traceback


def test_forms(sandbox: Any) -> None:
    assert sandbox.run_code("{'a': [1, None]}").results[0].json == {"a": [1, None]}
    shown = sandbox.run_code("from IPython.display import HTML, display\ndisplay(HTML('<b>'))\nHTML('<i>')")
    assert [(each.html, each.is_main_result) for each in shown.results] == [("<b>", False), ("<i>", True)]
    assert len(sandbox.run_code("list(range(5000))").text.split(",")) == 5000


def test_charts(sandbox: Any) -> None:
    pytest.importorskip("e2b_charts")
    code = """
    import matplotlib.pyplot as plt
    plt.plot([1, 2, 3], [4, 5, 6])
    plt.title("Title")
    plt.show()
    """
    (shown,) = sandbox.run_code(code).results
    assert shown.png
    assert (shown.chart.type, shown.chart.title) == ("line", "Title")
    assert not shown.extra


def test_data_frames(sandbox: Any) -> None:
    pytest.importorskip("pandas")
    code = (
        "import pandas; pandas.DataFrame({'a': [1, 2], 't': pandas.Timestamp(0), 'n': [1.5, float('inf')]})"
    )
    assert sandbox.run_code(code).results[0].data == {
        "a": [1, 2],
        "t": ["1970-01-01T00:00:00"] * 2,
        "n": [1.5, None],
    }


def test_pictures(sandbox: Any, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    code = (
        f"from PIL import Image; i = Image.new('RGB', (2, 2)); i.show(); i.save({str(tmp_path / 'i.png')!r})"
    )
    assert [bool(each.png) for each in sandbox.run_code(code).results] == [True, True]
    assert (tmp_path / "i.png").exists()


def test_variables_of_one_execution(sandbox: Any) -> None:
    value = 'it\'s "quoted"\n$HOME'
    assert sandbox.run_code("import os; print(os.environ['V'], end='')", envs={"V": value}).logs.stdout == [
        value
    ]
    assert sandbox.run_code("import os; os.environ.get('V', 'gone')").text == "gone"


def test_contexts(sandbox: Any, tmp_path: Path) -> None:
    context = sandbox.create_code_context(cwd=str(tmp_path))
    assert context.id in [each.id for each in sandbox.list_code_contexts()]
    assert sandbox.run_code("import os; y = 1; os.getcwd()", context=context).text == str(tmp_path)
    assert sandbox.run_code("y").error.name == "NameError"
    sandbox.restart_code_context(context)
    assert sandbox.run_code("y", context=context).error.value == "name 'y' is not defined"
    sandbox.remove_code_context(context)
    with pytest.raises(NotFoundException):
        sandbox.run_code("1", context=context)
    with pytest.raises(SandboxException, match="no kernel for the language cobol"):
        sandbox.run_code("1", language="cobol")


def test_a_timeout_stops_the_code_and_keeps_the_state(sandbox: Any) -> None:
    sandbox.run_code("kept = 7")
    with pytest.raises(TimeoutException):
        sandbox.run_code("import time; time.sleep(300)", timeout=1)
    assert sandbox.run_code("kept", timeout=60).text == "7"


def test_a_kernel_that_ends_is_started_again(sandbox: Any) -> None:
    context = sandbox.create_code_context()
    assert sandbox.run_code("import os; os._exit(1)", context=context).error.name == "ContextRestarting"
    assert sandbox.run_code("1 + 1", context=context).text == "2"
    sandbox.remove_code_context(context)


def test_an_idle_server_idles(process: subprocess.Popen[bytes]) -> None:
    """Each waking takes milliseconds under emulation, in every sandbox."""
    before = wakings(process.pid)
    time.sleep(2)
    assert wakings(process.pid) - before < 10  # looking around ten times a second would be 20


def wakings(pid: int) -> int:
    """How often the threads of a process have gone to sleep so far."""
    tasks = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", task, re.M)[0]) for task in tasks)
