"""Patterns of COPY against what Go's documentation says of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.dockerfile.match import BadPattern, compile_segment, is_pattern


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        # the table of Go's own match_test.go, as far as one segment goes
        ("abc", "abc", True),
        ("*", "abc", True),
        ("*c", "abc", True),
        ("a*", "a", True),
        ("a*", "abc", True),
        ("a*b*c*d*e*", "axbxcxdxe", True),
        ("a*b?c*x", "abxbbxdbxebxczzx", True),
        ("a*b?c*x", "abxbbxdbxebxczzy", False),
        ("ab[c]", "abc", True),
        ("ab[b-d]", "abc", True),
        ("ab[e-g]", "abc", False),
        ("ab[^c]", "abc", False),
        ("ab[^e-g]", "abc", True),
        ("a\\*b", "a*b", True),
        ("a\\*b", "ab", False),
        ("a?b", "a☺b", True),
        ("a[^a]b", "a☺b", True),
        ("a???b", "a☺b", False),
        ("[a-ζ]*", "α", True),
        ("*[a-ζ]", "A", False),
        ("[\\]a]", "]", True),
        ("[\\-]", "-", True),
        ("[x\\-]", "x", True),
        ("[x\\-]", "z", False),
        ("[\\-x]", "a", False),
        ("*", ".hidden", True),
        ("a.c", "abc", False),
        ("[d-b]", "c", False),
    ],
)
def test_matching(pattern: str, name: str, matches: bool) -> None:
    assert bool(compile_segment(pattern).fullmatch(name)) is matches


@pytest.mark.parametrize(
    "pattern", ["[]a]", "[-]", "[x-]", "[-x]", "[a-b-c]", "[", "[^", "[^bc", "a[", "a\\"]
)
def test_malformed_patterns(pattern: str) -> None:
    with pytest.raises(BadPattern):
        compile_segment(pattern)


@given(st.text("ab*?[]^-\\☺", max_size=12), st.text("ab*?[]^-\\☺", max_size=8))
def test_any_pattern_is_compiled_or_refused(pattern: str, name: str) -> None:
    try:
        compiled = compile_segment(pattern)
    except BadPattern:
        return
    if not is_pattern(pattern):
        assert bool(compiled.fullmatch(name)) is (pattern == name)


@given(st.text("a*?[]^-\\☺.", min_size=1, max_size=12))
def test_an_escaped_name_matches_itself_alone(name: str) -> None:
    escaped = "".join(f"\\{each}" for each in name)
    assert compile_segment(escaped).fullmatch(name)
    assert not compile_segment(escaped).fullmatch(name + "a")
