"""A kernel's messages as lines, against what E2B's clients read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from agentenv.interpreter.messages import ends, error, line_of


def message(kind: str, **content: Any) -> dict[str, Any]:
    return {"msg_type": kind, "content": content, "header": {"date": datetime(2026, 1, 2, tzinfo=UTC)}}


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_output(name: str) -> None:
    line = line_of(message("stream", name=name, text="a\n"))
    assert line == {"type": name, "text": "a\n", "timestamp": "2026-01-02T00:00:00+00:00"}


def test_results_have_the_names_that_clients_know() -> None:
    data = {
        "text/plain": "<Figure>",
        "text/html": "<b>",
        "image/png": "aGk=",
        "application/json": {"a": 1},
        "e2b/chart": {"type": "line"},
        "e2b/data": {"a": [1]},
        "application/x-other": "?",
        "text/latex": None,
    }
    assert line_of(message("display_data", data=data)) == {
        "type": "result",
        "is_main_result": False,
        "text": "<Figure>",
        "html": "<b>",
        "png": "aGk=",
        "json": {"a": 1},
        "chart": {"type": "line"},
        "data": {"a": [1]},
        "extra": {"application/x-other": "?"},
    }


@pytest.mark.parametrize(
    ("shown", "text"),
    [("'it'", "it"), ('"it\'s"', "it's"), ("'", "'"), ("1", "1"), ("\x1b[33m1\x1b[39m", "1"), ("", "")],
)
def test_a_strings_literal_is_its_text(shown: str, text: str) -> None:
    line = line_of(message("execute_result", data={"text/plain": shown}))
    assert line is not None
    assert (line["is_main_result"], line["text"]) == (True, text)


def test_errors_and_counts() -> None:
    said = line_of(message("error", ename="E", evalue="v", traceback=["\x1b[0;31mone\x1b[0m", "two"]))
    assert (
        said
        == {"type": "error", "name": "E", "value": "v", "traceback": "one\ntwo"}
        == error("E", "v", "one\ntwo")
    )
    assert line_of(message("execute_input", code="x", execution_count=3)) == {
        "type": "number_of_executions",
        "execution_count": 3,
    }


def test_what_says_nothing_to_clients() -> None:
    idle, busy = message("status", execution_state="idle"), message("status", execution_state="busy")
    assert line_of(idle) is line_of(message("clear_output")) is None
    assert (ends(idle), ends(busy), ends(message("stream", name="stdout", text=""))) == (True, False, False)
