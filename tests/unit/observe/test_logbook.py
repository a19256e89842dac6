"""Logs of sandboxes: what is kept, what a flood costs, what a query finds."""

from __future__ import annotations

import json

import pytest

from agentenv.observe.logbook import BURST_LINES, LINE_MAX, LINES_PER_S, Book, Entry, Logbook, Query, select
from agentenv.sandbox.observing import Change, Happening
from agentenv.sandbox.records import Origin, Sandbox
from agentenv.sandbox.transitions import State


class Time:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def book(time: Time) -> Book:
    return Book(clock=time)


def messages(book: Book) -> list[str]:
    return [entry.message for entry in book.entries]


def sandbox(name: str = "i1") -> Sandbox:
    return Sandbox(name, State.RUNNING, Origin("t", "base", "b"), 0.0, 1.0, 1, 1, 512, 1024)


def test_lines_come_whole_however_they_are_cut(book: Book) -> None:
    for part in (b"first\r\nsec", b"ond\n", b"th", b"ird"):
        book.console(part)
    assert messages(book) == ["first", "second"]
    book.console(b"\n\n")
    assert messages(book) == ["first", "second", "third"]


def test_what_only_a_terminal_understands_is_left_out(book: Book) -> None:
    book.console(b"\x1b[1;32mOK\x1b[0m \x07done\ttab \xff\n")
    assert messages(book) == ["OK done\ttab \ufffd"]


def test_a_flood_is_cut_and_says_so(book: Book, time: Time) -> None:
    line = b"x" * 99 + b"\n"
    for _ in range(100):
        book.console(line * 100)
    assert len(messages(book)) <= BURST_LINES + 1
    time.now += 10 / LINES_PER_S
    book.console(b"after\n")
    assert messages(book)[-1] == "after"
    left_out = messages(book)[-2]
    assert left_out.endswith("bytes left out]")
    assert int(left_out[1:].split()[0]) > 100 * 100 * 100 * 0.9


def test_a_line_without_an_end_is_cut(book: Book) -> None:
    for _ in range(100):
        book.console(b"y" * 1000)
    assert all(len(each) <= LINE_MAX for each in messages(book))
    assert sum(map(len, messages(book))) <= 100_000


def test_the_oldest_go_when_there_is_no_room() -> None:
    book = Book(keep_bytes=3000)
    for number in range(100):
        book.add(Entry(number, "info", "console", str(number)))
    assert 10 < len(book.entries) < 20
    assert messages(book)[-1] == "99"


ENTRIES = [
    Entry(1.001, "info", "console", "one"),
    Entry(2.0, "debug", "sandbox", "Two"),
    Entry(3.0, "error", "sandbox", "three"),
]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (Query(), "one Two three"),
        (Query(limit=2), "one Two"),
        (Query(direction="backward", limit=2), "three Two"),
        (Query(cursor=1001), "one Two three"),
        (Query(cursor=1002), "Two three"),
        (Query(cursor=2000, direction="backward"), "Two one"),
        (Query(level="info"), "one three"),
        (Query(level="warn"), "three"),
        (Query(search="TWO"), "Two"),
        (Query(limit=0), ""),
    ],
)
def test_queries(query: Query, found: str) -> None:
    assert " ".join(entry.message for entry in select(ENTRIES, query)) == found


def test_a_line_is_an_object_with_what_the_command_line_tool_reads() -> None:
    entry = Entry(1.0, "warn", "sandbox", "text ü", {"event": "paused"})
    assert json.loads(entry.line()) == {
        "level": "warn",
        "logger": "sandbox",
        "message": "text ü",
        "event": "paused",
    }


def test_logs_of_ended_sandboxes_are_kept_for_a_while() -> None:
    logbook = Logbook(ended=2)
    for name in ("i1", "i2", "i3"):
        logbook.happened(Happening(Change.CREATED, sandbox(name), 1.0))
        logbook.happened(Happening(Change.FAILED, sandbox(name), 2.0, {"reason": "its machine crashed"}))
    assert [name in logbook for name in ("i1", "i2", "i3")] == [False, True, True]
    failed = logbook.find("i3", Query(level="error"))
    assert [(entry.message, dict(entry.fields)) for entry in failed] == [
        ("Sandbox failed: its machine crashed", {"event": "failed"})
    ]
    logbook.wrote("i3", b"a last word\n")
    assert len(logbook.find("i3", Query())) == 2
    assert logbook.find("i1", Query()) == []
