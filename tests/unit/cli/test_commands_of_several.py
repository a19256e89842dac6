"""Commands that do something to several sandboxes, and those that go on until one ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from agentenv import __version__
from agentenv.cli.logs import milliseconds_of
from agentenv.cli.server import Node
from agentenv.errors import InvalidRequest
from support.served_commands import KEY, Aenv, started


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What commands ask of the node: methods and paths."""
    seen: list[str] = []
    real = Node.ask

    def ask(node: Node, method: str, path: str, *more: Any, **options: Any) -> Any:
        seen.append(f"{method} {path}")
        return real(node, method, path, *more, **options)

    monkeypatch.setattr(Node, "ask", ask)
    return seen


def test_each_of_several_is_tried_and_each_failure_told(aenv: Aenv) -> None:
    one, two = started(aenv, "--name", "one"), started(aenv, "--name", "two")
    said = aenv("pause", "one", "nobody", "two", "i")
    assert said.split() == [one, two]
    assert said.code == 3  # the first failure's; the other is a conflict
    assert 'there is no sandbox "nobody"' in said.told
    assert '"i" can be any of 2' in said.told
    assert "2 of 4 failed" in said.told
    assert set(aenv("list", "--state", "paused", "--output", "ids").split()) == {one, two}
    assert aenv("resume", "one", "two").split() == [one, two]
    assert aenv("snapshot", "create", one, "--name", "kept").code == 0
    said = aenv("snapshot", "delete", "nothing", "kept")
    assert (len(said.split()), said.code) == (1, 3)
    said = aenv("delete", "two", "two", one)
    assert set(said.split()) == {one, two}
    assert json.loads(aenv("list")) == []


def test_children_that_are_not_started_say_why(
    aenv: Aenv, bare: Aenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_API_KEY", aenv("key", "create", "small", "--sandboxes", "3").strip())
    parent = started(bare)
    said = bare("fork", parent, "4", "--output", "ids")
    assert (len(said.split()), said.code) == (2, 5)
    assert said.told.count("this API key may have 3 sandboxes") == 2
    assert "2 of 4 were not started" in said.told
    assert "aenv node status" not in said.told
    monkeypatch.setenv("E2B_API_KEY", KEY)


def test_no_more_is_listed_than_is_asked_for(aenv: Aenv, asked: list[str]) -> None:
    sandboxes = [started(aenv, "--name", f"n{number}") for number in range(3)]
    asked.clear()
    assert len(set(aenv("list", "--limit", "2", "--output", "ids").split()) & set(sandboxes)) == 2
    assert asked == ["GET /v2/sandboxes?limit=2"]
    asked.clear()
    assert aenv("timeout", "n1", "900").strip() == sandboxes[1]
    assert asked[0] == "GET /v2/sandboxes?metadata=name%3Dn1"
    assert len(asked) == 2


@pytest.mark.parametrize(
    "words", [["logs", "-f"], ["metrics", "--watch", "-o", "table"]], ids=["logs", "metrics"]
)
def test_what_is_followed_ends_with_its_sandbox(aenv: Aenv, words: list[str]) -> None:
    sandbox = started(aenv)
    program = [sys.executable, "-m", "agentenv", *words, sandbox]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = process.stdout.readline()
        aenv("delete", sandbox)
        rest, told = process.communicate(timeout=60)
    assert seen
    assert (process.returncode, told) == (0, "aenv: the sandbox has ended\n")
    if words[0] == "logs":
        assert json.loads(rest.splitlines()[-1])["message"] == "Sandbox killed: killed"


def test_parts_of_a_log(aenv: Aenv) -> None:
    sandbox = started(aenv)
    aenv("pause", sandbox)
    whole = aenv("logs", sandbox).splitlines()
    assert len(whole) > 1
    assert aenv("logs", sandbox, "--tail", "1").splitlines() == whole[-1:]
    assert aenv("logs", sandbox, "--tail", "0") == ""
    assert aenv("logs", sandbox, "--since", "1h").splitlines() == whole
    assert aenv("logs", sandbox, "--since", "2999-01-01T00:00:00Z") == ""
    assert aenv("logs", sandbox, "--since", "yesterday").code == 2


def test_when_a_log_is_wanted_from() -> None:
    assert milliseconds_of("90s", 1000.0) == 910_000
    assert milliseconds_of("2h", 10_000.0) == 2_800_000
    assert milliseconds_of("9999d", 10.0) == 0
    assert milliseconds_of("1970-01-01T00:00:01.5Z", time.time()) == 1500
    with pytest.raises(InvalidRequest, match="soon"):
        milliseconds_of("soon", 0.0)


def test_versions(aenv: Aenv, bare: Aenv, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(aenv("version")) == {
        "aenv": __version__,
        "node": {"url": url, "version": __version__},
    }
    assert aenv("version", "--output", "table").splitlines()[1] == f"node {__version__} ({url})"
    monkeypatch.delenv("E2B_API_URL")
    assert json.loads(bare("version")) == {"aenv": __version__, "node": None}
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    assert "not reached" in bare("version", "--output", "table")
