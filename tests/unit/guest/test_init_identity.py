"""What /init writes, as pure functions where it can be."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.guest import identity


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2024-02-29T12:34:56.123456789Z", 1709210096_123456789),
        ("2024-02-29t12:34:56.1z", 1709210096_100000000),
        ("2024-02-29T14:34:56.5+02:00", 1709210096_500000000),
        ("2024-02-29T07:04:56-05:30", 1709210096_000000000),
        ("2024-02-29 12:34:56.1234567891234Z", 1709210096_123456789),
    ],
)
def test_times(text: str, nanoseconds: int) -> None:
    assert identity.parse_time(text) == nanoseconds


@given(
    st.datetimes(
        datetime.datetime(1970, 1, 1), datetime.datetime(2200, 1, 1), timezones=st.just(datetime.UTC)
    )
)
def test_times_are_those_of_datetime(moment: datetime.datetime) -> None:
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    microseconds = (moment - epoch) // datetime.timedelta(microseconds=1)
    assert identity.parse_time(moment.isoformat()) == microseconds * 1000


@pytest.mark.parametrize(
    "text", ["", "now", "2024-01-01", "2024-01-01T00:00:00", "2024-13-01T00:00:00Z", "2024-01-01T25:00:00Z"]
)
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError):
        identity.parse_time(text)


def test_hosts() -> None:
    text = "127.0.0.1 localhost\n# a comment\n10.0.0.1 other"
    once = identity.hosts_with(text, "one")
    assert once == text + "\n127.0.1.1\tone\t# agentenv\n"
    assert identity.hosts_with(once, "two") == text + "\n127.0.1.1\ttwo\t# agentenv\n"


def test_a_file_is_replaced_in_place_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "name"
    for content, mode in (("first\n", 0o644), ("a longer second\n", 0o444), ("3\n", 0o644)):
        identity.write_file(str(path), content, mode)
        assert path.read_text() == content
        assert path.stat().st_mode & 0o7777 == mode


def test_a_reader_never_sees_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "machine-id"
    identity.write_file(str(path), "a" * 33)
    with path.open() as reader:
        identity.write_file(str(path), "b" * 33)
        assert reader.read() == "b" * 33  # the same file, not another in its place


def test_a_full_disk_is_no_success() -> None:
    with pytest.raises(OSError, match="No space"):
        identity.write_file("/dev/full", "anything", 0o666)
