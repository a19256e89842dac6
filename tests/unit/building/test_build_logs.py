"""Logs: lines out of streams, pages out of lines, and a limit to it all."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.building import logs
from agentenv.building.logs import ENTRIES_MAX, LINE_MAX, Entry, Feed, Lines, Logs, fitting
from agentenv.config import Settings
from agentenv.records.database import Database
from agentenv.template.builds import Builds
from agentenv.template.store import Templates


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "aenv.db")


@pytest.fixture
def build_id(database: Database, tmp_path: Path) -> str:
    builds = Builds(database, Templates(database, Settings(home=tmp_path)))
    return builds.open("name", ("default",)).id


def entries(count: int, level: str = "info") -> list[Entry]:
    return [Entry(float(number), level, f"line {number}", "1") for number in range(count)]


def test_pages_follow_each_other_and_end_with_an_empty_one(database: Database, build_id: str) -> None:
    told = Logs(database)
    told.add(build_id, entries(150))
    told.add(build_id, [Entry(150.0, "warn", "last")])
    pages: list[list[Entry]] = []
    while page := told.page(build_id, sum(len(each) for each in pages)):
        pages.append(page)
    assert [len(page) for page in pages] == [100, 51]
    assert [entry for page in pages for entry in page] == [*entries(150), Entry(150.0, "warn", "last")]


def test_levels_are_counted_by_themselves(database: Database, build_id: str) -> None:
    told = Logs(database)
    told.add(build_id, [*entries(3, "debug"), *entries(2, "info"), *entries(1, "error")])
    assert [entry.level for entry in told.page(build_id, 0, level="info")] == ["info", "info", "error"]
    assert [entry.level for entry in told.page(build_id, 2, level="info")] == ["error"]
    assert told.page(build_id, 0, limit=2, level="debug") == entries(2, "debug")


def test_what_a_build_told_goes_with_it(database: Database, build_id: str) -> None:
    told = Logs(database)
    told.add(build_id, entries(1))
    with database.transaction() as cursor:
        cursor.execute("DELETE FROM builds")
    assert told.page(build_id, 0) == []
    told.add(build_id, entries(1))  # by one that is about to end
    told.add(str(uuid.uuid4()), entries(1))
    assert database.query("SELECT * FROM build_logs") == []


def test_a_log_has_an_end(database: Database, build_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "ENTRIES_MAX", 5)
    told = Logs(database)
    for _ in range(4):
        told.add(build_id, entries(2))
    page = told.page(build_id, 0)
    assert len(page) == 5
    assert page[-1].level == "warn" and "full" in page[-1].message


@given(st.integers(0, ENTRIES_MAX + 5), st.integers(0, 10))
def test_never_more_than_fit(count: int, more: int) -> None:
    kept = fitting(entries(more), count)
    assert len(kept) <= max(0, ENTRIES_MAX - count)
    assert len(kept) == more or count + len(kept) >= ENTRIES_MAX


# Feeds


def test_who_comes_later_hears_it_all() -> None:
    feed = Feed()
    first: list[str] = []
    late: list[str] = []
    feed.listen(lambda told: first.extend(entry.message for entry in told))
    feed.tell("info", "one")
    hearing = lambda told: late.extend(entry.message for entry in told)  # noqa: E731
    feed.listen(hearing)
    feed.tell("info", "two", "1")
    feed.ignore(hearing)
    feed.tell("info", "three")
    assert (first, late) == (["one", "two", "three"], ["one", "two"])


# Lines


def lines_of(*pieces: tuple[str, bytes]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    lines = Lines(lambda stream, line: found.append((stream, line)))
    for stream, data in pieces:
        lines.feed(stream, data)
    lines.end()
    return found


def test_lines_are_put_together() -> None:
    assert lines_of(("stdout", b"a"), ("stderr", b"x\ny"), ("stdout", b"b\n\n  \nc\r\n")) == [
        ("stderr", "x"),
        ("stdout", "ab"),
        ("stdout", "c"),
        ("stderr", "y"),
    ]


def test_letters_cut_in_two_are_whole_and_broken_ones_do_no_harm() -> None:
    assert lines_of(("stdout", b"\xc3"), ("stdout", b"\xa4\xff\n")) == [("stdout", "ä\ufffd")]


def test_a_progress_bar_is_what_it_came_to() -> None:
    assert lines_of(("stdout", b"10%\r50%\r100%\n")) == [("stdout", "100%")]


def test_a_line_without_an_end_is_cut() -> None:
    found = lines_of(("stdout", b"x" * (2 * LINE_MAX + 5)))
    assert [len(line) for _, line in found] == [LINE_MAX, LINE_MAX, 5]


@given(st.lists(st.binary(max_size=12), max_size=6))
def test_cuts_do_not_matter(pieces: list[bytes]) -> None:
    whole = lines_of(("stdout", b"".join(pieces)))
    assert lines_of(*(("stdout", piece) for piece in pieces)) == whole
