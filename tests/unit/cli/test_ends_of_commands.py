"""How commands end that are interrupted, not answered or not confirmed; and what they load before."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.cli import COMMANDS, main
from agentenv.cli.api import TookTooLong, Unreachable, send
from agentenv.cli.server import Node
from support.interrupting import HEEDING

HEAVY = (
    *("httpx", "pydantic", "numpy", "fastapi", "uvicorn", "cryptography", "e2b", "ssl"),
    *("asyncio", "concurrent.futures", "http.client", "sqlite3"),
)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_ctrl_c_is_130(silent: socket.socket, tmp_path: Path) -> None:
    words = [*HEEDING, sys.executable, "-m", "agentenv", "list", "--url", url_of(silent), "--api-key", "k"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)  # it is asked, and waits
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said


def test_a_server_that_says_nothing_is_not_one_that_is_not_there(silent: socket.socket) -> None:
    with pytest.raises(TookTooLong, match="GET /v2/sandboxes") as late:
        Node(url_of(silent), "k").call("GET", "/v2/sandboxes", limit_s=0.05)
    assert late.value.exit_code == 9
    silent.close()
    with pytest.raises(Unreachable, match="does not answer") as gone:
        send("GET", "http://127.0.0.1:9/")
    assert gone.value.exit_code == 8


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nonsense"], 2, "No such command"),
        (["snapshots", "list"], 2, "Did you mean snapshot?"),
        (["delete", "--url", "http://127.0.0.1:9", "--api-key", "k"], 2, "--all"),
        (["list", "--url", "http://127.0.0.1:9", "--api-key", "k"], 8, "does not answer"),
        (["exec", "mine", "--"], 2, "give a command"),
        (["exec", "--usr", "root", "mine", "ls"], 2, "--usr"),
        (["list", "--profile", "nobody"], 3, "nobody"),
        (["--version"], 0, ""),
        (["completion", "bash"], 0, ""),
    ],
)
def test_the_exit_code_says_what_it_was(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert (ended.value.code or 0) == code
    assert said in capsys.readouterr().err


def test_help_loads_nothing_that_takes_long() -> None:
    listed = f"import sys; from agentenv.cli import cli; names = {sorted(COMMANDS)!r}\n"
    listed += "for words in ([], *([name] for name in names)):\n"
    listed += "    try: cli.main([*words, '--help'], standalone_mode=False)\n"
    listed += "    except SystemExit: pass\n"
    listed += f"    for heavy in {HEAVY!r}:\n"
    listed += "        if heavy in sys.modules: sys.exit(f'{words}: {heavy}')\n"
    done = subprocess.run(
        [sys.executable, "-c", listed], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
