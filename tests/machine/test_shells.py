"""Shells and commands in sandboxes, by the program in a real terminal."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from e2b import Sandbox

from support.aenv_command import AenvCommand
from support.running import RunningNode
from support.tmux import Tmux

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

GREEN = "\x1b[32m"
PASTED = "".join(f"{number:05} {'x' * 60}\n" for number in range(1550))


@pytest.fixture
def aenv(node: RunningNode, tmp_path: Path) -> AenvCommand:
    return AenvCommand(node, tmp_path)


@pytest.fixture
def tmux_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "t"
    directory.mkdir()
    return directory


def test_a_shell_in_a_terminal(
    aenv: AenvCommand, node: RunningNode, tmp_path: Path, tmux_directory: Path
) -> None:
    command = f"TERM=xterm-color {sys.executable} -m agentenv"
    with Tmux(tmux_directory, aenv.environment) as tmux:
        tmux.type(f"stty -g > {tmp_path}/before; {command} start base --name attached --metadata test=shells")
        tmux.wait(lambda shown: shown.rstrip().endswith("$"))
        try:
            _in_the_shell(tmux, tmp_path, aenv)
            _paused_and_resumed(tmux, node, aenv)
            _left_and_gone_back_to(tmux, command, tmp_path, aenv)
            _a_command_with_the_terminal(tmux, command)
            _tables_and_colours(tmux, command)
        finally:
            (sandbox,) = aenv.text("list", "--metadata", "test=shells", "--output", "ids").split()
            aenv("delete", sandbox)


def _in_the_shell(tmux: Tmux, tmp_path: Path, aenv: AenvCommand) -> None:
    tmux.type("kept=yes; echo $TERM $LANG; stty size")
    tmux.wait_for("28 90")
    assert "xterm-color C.UTF-8" in tmux.screen()
    tmux.run("resize-window", "-x", "100", "-y", "30")
    tmux.type("until stty size | grep '^30 100'; do sleep 0.1; done")
    tmux.wait_for("30 100")
    tmux.type("sh -c 'echo be\\gun; exec sleep 600'")
    tmux.wait_for("begun")
    tmux.keys("C-c")
    tmux.wait(lambda shown: "^C" in shown and shown.rstrip().endswith("$"))

    (tmp_path / "pasted").write_text(PASTED)
    tmux.type("clear; stty -echo; echo rea\\dy; cat > pasted; stty echo; echo pas\\ted")
    tmux.wait_for("ready")
    tmux.paste(tmp_path / "pasted")
    tmux.keys("C-d")
    tmux.wait_for("pasted")
    assert aenv.text("exec", "attached", "sha256sum", "pasted").split()[0] == sha256(PASTED.encode())

    tmux.type("clear; /.agentenv/bin/busybox vi typed")
    tmux.wait_for("~")
    tmux.keys("i")
    tmux.type("typed in an editor")
    tmux.wait_for("typed in an editor")
    tmux.keys("Escape")
    tmux.wait_for("- typed")  # out of inserting: keys at once after it would be taken for a key of their own
    tmux.type(":wq")
    tmux.wait(lambda shown: shown.rstrip().endswith("$"))
    assert aenv.text("exec", "attached", "cat", "typed").startswith("typed in an editor\n")


def _paused_and_resumed(tmux: Tmux, node: RunningNode, aenv: AenvCommand) -> None:
    tmux.type("clear")
    aenv("pause", "attached")
    tmux.wait_for("[aenv: the sandbox is paused")
    aenv("resume", "attached")  # by somebody else: it is noticed
    tmux.wait_for("[aenv: attached again]")
    tmux.type("clear; echo kept: $kept")
    tmux.wait_for("kept: yes")
    aenv("pause", "attached")
    tmux.wait_for("[aenv: the sandbox is paused")
    tmux.keys("Enter")  # any key
    tmux.wait_for("[aenv: attached again]")
    tmux.type("clear; echo again: $kept")
    tmux.wait_for("again: yes")


def _left_and_gone_back_to(tmux: Tmux, command: str, tmp_path: Path, aenv: AenvCommand) -> None:
    tmux.type("clear; printf '\\033[?1049h\\033[?25lfull'")
    tmux.wait(lambda shown: tmux.fact("alternate_on") == "1")
    tmux.keys("C-p", "C-q")
    tmux.wait_for("[aenv: the shell was left and goes on")
    assert (tmux.fact("alternate_on"), tmux.fact("cursor_flag")) == ("0", "1")
    tmux.type(f"clear; stty -g | cmp - {tmp_path}/before && echo as be\\fore")
    tmux.wait_for("as before")
    (left,) = json.loads(aenv.text("connect", "attached", "--list"))
    assert left["shell"].startswith("aenv-shell-") and left["pid"] > 1
    tmux.type(f"clear; {command} connect attached; echo sta\\tus $?")
    tmux.wait(lambda shown: shown.rstrip().endswith("$"))
    tmux.type("echo back: $kept; exit 7")
    tmux.wait_for("back: yes")
    tmux.wait_for("status 7")


def _a_command_with_the_terminal(tmux: Tmux, command: str) -> None:
    script = "tty; read word; echo got $word; exec sleep 600"
    tmux.type(f"clear; {command} exec -it attached -- sh -c '{script}'; echo sta\\tus $?")
    tmux.wait_for("/dev/pts/")
    tmux.type("a word")
    tmux.wait_for("got a word")
    tmux.keys("C-c")
    tmux.wait(lambda shown: "^Cstatus 130" in shown)


def _tables_and_colours(tmux: Tmux, command: str) -> None:
    listing = f"{command} list --metadata test=shells"
    tmux.type(f"clear; {listing}; echo lis\\ted")
    assert tmux.wait_for("listed").startswith("ID ")
    assert f"{GREEN}running" in tmux.screen("-e")
    tmux.type(f"clear; NO_COLOR=1 {listing}; echo lis\\ted")
    assert "running" in tmux.wait_for("listed")
    assert GREEN not in tmux.screen("-e")
    tmux.type(f"clear; {listing} | tee; echo lis\\ted")
    assert '"state": "running"' in tmux.wait_for("listed")
    assert GREEN not in tmux.screen("-e")


def test_commands(aenv: AenvCommand, sandbox: Sandbox) -> None:
    name = sandbox.sandbox_id
    done = aenv(
        "exec",
        "-u",
        "root",
        "-w",
        "/tmp",
        "-e",
        "A=1 2",
        name,
        "--",
        "sh",
        "-c",
        'id -u; pwd; echo "$A" >&2; exit 3',
        status=3,
    )
    assert (done.stdout, done.stderr) == (b"0\n/tmp\n", b"1 2\n")
    data = bytes(range(256)) * 4000
    assert aenv("exec", name, "sha256sum", given=data).stdout.split()[0].decode() == sha256(data)
    many = aenv("exec", name, "head -c 2000000 /dev/zero | tr '\\0' x").stdout
    assert many == b"x" * 2_000_000
    assert b"no-such-program" in aenv("exec", name, "no-such-program", status=127).stderr
    assert b"longer than 0.5 s" in aenv("exec", "--timeout", "0.5", name, "sleep", "60", status=9).stderr
    assert aenv("exec", name, "sh", "-c", "kill -9 $$", status=137).stdout == b""
    assert aenv("exec", "-t", name, "tty").stdout.startswith(b"/dev/pts/")
    pid = aenv.text("exec", "-d", name, "sleep", "600").strip()
    assert aenv.text("exec", name, f"cat /proc/{pid}/cmdline | tr '\\0' ' '; kill {pid}") == "sleep 600 "
    assert b"is no program" not in aenv("exec", "nobody-knows", "true", status=3).stderr


def test_signals_are_passed_on(aenv: AenvCommand, sandbox: Sandbox) -> None:
    script = "trap 'echo got; exit 5' INT; echo ready; while :; do sleep 0.1; done"
    with aenv.begin("exec", sandbox.sandbox_id, "--", "sh", "-c", script) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"ready\n"
        command.send_signal(signal.SIGINT)
        assert command.stdout.read() == b"got\n"
        assert command.wait() == 5
    script = "trap 'echo again' INT; echo ready; while :; do sleep 0.1; done"
    with aenv.begin("exec", sandbox.sandbox_id, "--", "sh", "-c", script) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"ready\n"
        for _ in range(2):
            command.send_signal(signal.SIGINT)
            assert command.stdout.readline() == b"again\n"
        command.send_signal(signal.SIGINT)
        assert command.wait() == 137


def test_a_pause_in_the_midst_is_told(aenv: AenvCommand, sandbox_factory: Callable[..., Sandbox]) -> None:
    sandbox = sandbox_factory()
    with aenv.begin("exec", sandbox.sandbox_id, "--", "sh", "-c", "echo ready; sleep 600") as command:
        assert command.stdout is not None and command.stderr is not None
        assert command.stdout.readline() == b"ready\n"
        aenv("pause", sandbox.sandbox_id)
        said = command.stderr.read().decode()
        assert command.wait() == 4
    assert "was paused while the command ran" in said
    assert f"aenv resume {sandbox.sandbox_id}" in said


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
