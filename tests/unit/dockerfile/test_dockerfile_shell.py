"""Commands as text for a shell, run by real ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.dockerfile.shell import DEFAULT_SHELL, run_text, start_text, waits_for_a_terminal
from agentenv.dockerfile.syntax import DockerfileError, Instruction, parse

BASH = ("/bin/bash", "-o", "pipefail", "-c")
SHELLS = [("/bin/sh", "-c"), ("/bin/bash", "-l", "-c")]


def only(text: str) -> Instruction:
    return parse(f"FROM a\n{text}\n").instructions[1]


def run(command: str, shell: tuple[str, ...] = ("/bin/sh", "-c")) -> tuple[int, str]:
    done = subprocess.run([*shell, command], capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout


def test_plain_commands_stay_as_they_are() -> None:
    assert (
        run_text(only("RUN apt-get update && echo 'a  b'"), DEFAULT_SHELL, {})
        == "apt-get update && echo 'a  b'"
    )


@pytest.mark.parametrize("outer", SHELLS)
@pytest.mark.parametrize(
    ("written", "output"),
    [
        ("RUN echo $((1+1)) $A", "2 x y\n"),
        ('RUN ["echo", "$A", "b  c", "it\'s"]', "$A b  c it's\n"),
        ("RUN <<EOF\necho one\necho $A\nEOF", "one\nx y\n"),
        ("RUN <<-EOF\n\techo one\n\tEOF", "one\n"),
        ("RUN cat <<EOF && echo end\nhello $A\nEOF", "hello x y\nend\n"),
        ("RUN cat <<'EOF' - <<B\nraw $A\nEOF\nb\nB", "b\n"),
        ("RUN <<EOF\n#!/usr/bin/env python3\nprint('from', 'python')\nEOF", "from python\n"),
        ("RUN <<EOF\n#!/bin/sh\necho AENV_EOF\nAENV_EOF=1\necho $AENV_EOF\nEOF", "AENV_EOF\n1\n"),
        ("RUN echo a \\\n   && echo b", "a\nb\n"),
    ],
)
def test_what_commands_do(outer: tuple[str, ...], written: str, output: str) -> None:
    assert run(run_text(only(written), DEFAULT_SHELL, {"A": "x y", "not-a-name": "1"}), outer) == (0, output)


@pytest.mark.parametrize("outer", SHELLS)
def test_a_failing_script_fails_and_leaves_no_file(outer: tuple[str, ...]) -> None:
    text = run_text(only("RUN <<SCRIPT\n#!/bin/sh\nexit 7\nSCRIPT"), DEFAULT_SHELL, {})
    assert run(text, outer)[0] == 7
    assert not Path("/tmp/SCRIPT.aenv-run").exists()


def test_the_shell_of_shell() -> None:
    failing = run_text(only("RUN false | true"), BASH, {})
    assert run(failing)[0] == 1
    assert run(run_text(only("RUN false | true"), DEFAULT_SHELL, {}))[0] == 0
    assert run(run_text(only("RUN <<EOF\necho $0 it\\'s\nEOF"), BASH, {"B": "1"})) == (0, "/bin/bash it's\n")


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60))
@settings(max_examples=25, deadline=None)
def test_any_value_of_an_argument_reaches_the_command(value: str) -> None:
    command = run_text(only('RUN printf "%s" "$A"'), DEFAULT_SHELL, {"A": value})
    done = subprocess.run(["/bin/sh", "-c", command.encode()], capture_output=True, timeout=30, check=False)
    assert done.stdout == value.encode()


@pytest.mark.parametrize("written", ["RUN", "RUN []", "RUN --mount=type=cache,target=/x"])
def test_nothing_to_run(written: str) -> None:
    with pytest.raises(DockerfileError, match="no command"):
        run_text(only(written), DEFAULT_SHELL, {})


# The table of the Dockerfile reference, "Understand how CMD and ENTRYPOINT interact".
@pytest.mark.parametrize(
    ("entrypoint", "cmd", "command"),
    [
        (None, None, None),
        (None, '["exec_cmd", "p1 cmd"]', "exec_cmd 'p1 cmd'"),
        (None, "exec_cmd p1_cmd", "exec_cmd p1_cmd"),
        ("exec_entry p1", None, "exec_entry p1"),
        ("exec_entry p1", '["exec_cmd", "p1_cmd"]', "exec_entry p1"),
        ("exec_entry p1", "exec_cmd p1_cmd", "exec_entry p1"),
        ('["exec_entry", "p1"]', None, "exec_entry p1"),
        ('["exec_entry", "p1"]', '["exec_cmd", "p1_cmd"]', "exec_entry p1 exec_cmd p1_cmd"),
        ('["exec_entry", "p1"]', "exec_cmd p1_cmd", "exec_entry p1 /bin/sh -c 'exec_cmd p1_cmd'"),
        ("[]", "exec_cmd", "exec_cmd"),
        (None, "[]", None),
    ],
)
def test_entrypoint_and_cmd(entrypoint: str | None, cmd: str | None, command: str | None) -> None:
    def given(name: str, words: str | None) -> tuple[Instruction, tuple[str, ...]] | None:
        return None if words is None else (only(f"{name} {words}"), DEFAULT_SHELL)

    assert start_text(given("ENTRYPOINT", entrypoint), given("CMD", cmd)) == command


def test_a_start_command_goes_through_the_shell_of_its_time() -> None:
    assert start_text(None, (only("CMD a | b"), BASH)) == "exec /bin/bash -o pipefail -c 'a | b'"


@pytest.mark.parametrize("command", ["bash", "/bin/sh", "python3.12", "python3", "node", "/bin/bash -l"])
def test_bare_interactive_programs_wait_for_a_terminal(command: str) -> None:
    assert waits_for_a_terminal(command)


@pytest.mark.parametrize("command", ["python3 app.py", "bash -c ls", "nginx", "'open", ""])
def test_others_do_not(command: str) -> None:
    assert not waits_for_a_terminal(command)
