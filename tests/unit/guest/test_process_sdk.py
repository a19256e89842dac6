"""Commands and terminals through E2B's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from e2b import AsyncSandbox, CommandExitException, PtySize, Sandbox, TimeoutException

from support.core_agent import core_agent


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with core_agent() as url:
        yield url


@pytest.fixture(scope="module")
def sandbox(url: str) -> Any:
    return Sandbox.create(debug=True, sandbox_url=url)


def test_run(sandbox: Any) -> None:
    done = sandbox.commands.run("echo ü; echo err >&2; pwd; echo $A", envs={"A": "b"}, cwd="/tmp")
    assert (done.stdout, done.stderr, done.exit_code) == ("ü\n/tmp\nb\n", "err\n", 0)
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("echo before; exit 4")
    assert (caught.value.exit_code, caught.value.stdout) == (4, "before\n")


def test_output_arrives_while_it_runs_and_before_a_timeout(sandbox: Any) -> None:
    seen: list[str] = []
    with pytest.raises(TimeoutException):
        sandbox.commands.run("echo early; sleep 100", on_stdout=seen.append, timeout=2)
    assert "".join(seen) == "early\n"


def test_background_input_list_and_kill(sandbox: Any) -> None:
    handle = sandbox.commands.run("cat; echo done", background=True, stdin=True)
    assert handle.pid in [process.pid for process in sandbox.commands.list()]
    sandbox.commands.send_stdin(handle.pid, "hello\n")
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "hello\ndone\n"
    sleeper = sandbox.commands.run("sleep 100", background=True)
    assert sandbox.commands.kill(sleeper.pid) is True
    with pytest.raises(CommandExitException) as caught:
        sleeper.wait()
    assert caught.value.exit_code == -1
    assert sandbox.commands.kill(sleeper.pid) is False


def test_connect(sandbox: Any) -> None:
    handle = sandbox.commands.run("read x; echo $x", background=True, stdin=True)
    other = sandbox.commands.connect(handle.pid)
    sandbox.commands.send_stdin(handle.pid, "both\n")
    assert (handle.wait().stdout, other.wait().stdout) == ("both\n", "both\n")


def test_terminal(sandbox: Any) -> None:
    shown: list[bytes] = []
    handle = sandbox.pty.create(PtySize(rows=30, cols=100), envs={"PS1": "$ "})
    sandbox.pty.resize(handle.pid, PtySize(rows=31, cols=101))
    sandbox.pty.send_stdin(handle.pid, b"stty size; exit 7\n")
    with pytest.raises(CommandExitException) as caught:
        handle.wait(on_pty=shown.append)
    assert caught.value.exit_code == 7
    assert b"31 101" in b"".join(shown)


async def test_async(url: str) -> None:
    sandbox: Any = await AsyncSandbox.create(debug=True, sandbox_url=url)
    handle = await sandbox.commands.run("cat", background=True, stdin=True)
    await handle.send_stdin("one ")
    await handle.send_stdin("two")
    await handle.close_stdin()
    assert (await handle.wait()).stdout == "one two"
