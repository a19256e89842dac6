"""Codings, ranges, dates and types of a download."""

from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.guest.files_negotiation import (
    OCTETS,
    NotAcceptable,
    Unsatisfiable,
    accepts,
    byte_range,
    content_type,
    disposition,
    http_date,
    parse_http_date,
)


@pytest.mark.parametrize(
    ("header", "gzip", "plain"),
    [
        (None, False, True),
        ("", False, True),
        ("gzip", True, True),
        ("GZIP", True, True),
        ("gzip;q=0.5", True, True),
        ("gzip;q=0", False, True),
        ("gzip, identity;q=0", True, False),
        ("gzip;q=0.2, identity;q=0.8", False, True),
        ("gzip, deflate, br, zstd", False, True),
        ("deflate", False, True),
        ("identity", False, True),
        ("*", False, True),
        ("*;q=0, gzip", True, False),
        ("identity;q=0, *", True, False),
        ("gzip;q=nonsense", True, True),
    ],
)
def test_codings(header: str | None, gzip: bool, plain: bool) -> None:
    assert accepts(header) == (gzip, plain)


@pytest.mark.parametrize("header", ["identity;q=0", "*;q=0", "br, *;q=0"])
def test_nothing_acceptable(header: str) -> None:
    with pytest.raises(NotAcceptable):
        accepts(header)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("bytes=0-0", (0, 1)),
        ("bytes=2-", (2, 8)),
        ("bytes=2-5", (2, 4)),
        ("bytes=2-500", (2, 8)),
        ("bytes=-3", (7, 3)),
        ("bytes=-30", (0, 10)),
        ("bytes = 1 - 2", (1, 2)),
        ("bytes=5-2", None),
        ("bytes=-", None),
        ("bytes=a-b", None),
        ("bytes=0-1,4-5", None),
        ("lines=0-1", None),
        ("bytes=+1-2", None),
        ("bytes=١-٢", None),
    ],
)
def test_ranges(header: str | None, expected: tuple[int, int] | None) -> None:
    assert byte_range(header, 10) == expected


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=10-20", "bytes=-0"])
def test_ranges_without_a_byte(header: str) -> None:
    with pytest.raises(Unsatisfiable):
        byte_range(header, 10)


def test_an_empty_file_has_no_ranges() -> None:
    assert byte_range("bytes=0-", 0) is None


@given(st.integers(0, 2**35))
def test_dates(seconds: int) -> None:
    assert http_date(seconds) == formatdate(seconds, usegmt=True)
    assert parse_http_date(http_date(seconds)) == seconds


@pytest.mark.parametrize(
    "text", ["", "now", "Sun, 06 Nov 1994 08:49:37 PST", "Sun, 06 Foo 1994 08:49:37 GMT"]
)
def test_dates_that_are_none(text: str) -> None:
    assert parse_http_date(text) is None


@pytest.mark.parametrize(
    ("name", "sample", "kind"),
    [
        ("a.txt", b"\x00", "text/plain; charset=utf-8"),
        ("a.JSON", b"", "application/json"),
        ("Makefile", b"all:\n\techo", "text/plain; charset=utf-8"),
        ("a.bin", b"\x00\x01", OCTETS),
        ("a", b"\xff\xfe\xfd", OCTETS),
        ("a", "ü".encode() * 256 + b"\xc3", "text/plain; charset=utf-8"),
        ("a", ("x" + "ü" * 400).encode(), "text/plain; charset=utf-8"),
    ],
)
def test_types(name: str, sample: bytes, kind: str) -> None:
    assert content_type(name, sample) == kind


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("test.txt", "inline; filename=test.txt"),
        ("my file.txt", 'inline; filename="my file.txt"'),
        ('a"b', 'inline; filename="a\\"b"'),
        ("ü.txt", "inline; filename*=utf-8''%C3%BC.txt"),
        ("a\nb", "inline; filename*=utf-8''a%0Ab"),
    ],
)
def test_dispositions(name: str, header: str) -> None:
    assert disposition(name, name.encode()) == header
