"""Path patterns of COPY and ADD: Go's `filepath.Match`, one path segment at a time.

`*` is any run of characters, `?` one, `[a-z]` and `[^a-z]` one of a class; a backslash makes the next one
plain.
Source: https://pkg.go.dev/path/filepath#Match.
"""

from __future__ import annotations

import re

_SPECIAL = frozenset("*?[\\")


class BadPattern(ValueError):
    """A pattern that Go would refuse: a class that does not end, or a backslash at the end."""


def is_pattern(segment: str) -> bool:
    """Whether a segment has to be matched, instead of being a name."""
    return not _SPECIAL.isdisjoint(segment)


def compile_segment(segment: str) -> re.Pattern[str]:
    """A regular expression that matches whole names as the pattern does.

    Raises:
        BadPattern: it is not a pattern.
    """
    pieces: list[str] = []
    position = 0
    while position < len(segment):
        character = segment[position]
        if character == "*":
            pieces.append("[^/]*")
        elif character == "?":
            pieces.append("[^/]")
        elif character == "[":
            piece, position = _class(segment, position + 1)
            pieces.append(piece)
            continue
        else:
            character, position = _plain(segment, position)
            pieces.append(re.escape(character))
            continue
        position += 1
    return re.compile("".join(pieces), re.DOTALL)


def _plain(segment: str, position: int) -> tuple[str, int]:
    """The character at that place, or the one that a backslash there makes plain; and the place after it."""
    if segment[position] == "\\":
        position += 1
    if position >= len(segment):
        raise BadPattern(segment)
    return segment[position], position + 1


def _class(segment: str, position: int) -> tuple[str, int]:
    negated = segment.startswith("^", position)
    position += negated
    ranges: list[str] = []
    while not (ranges and segment.startswith("]", position)):
        low, position = _bound(segment, position)
        high = low
        if segment.startswith("-", position):
            high, position = _bound(segment, position + 1)
        # Go matches nothing with an upside-down range; re refuses it.
        ranges.append(f"{re.escape(low)}-{re.escape(high)}" if low <= high else "")
    inner = "".join(ranges)
    if not inner:
        return ("[^/]" if negated else "(?!)"), position + 1
    return f"[{'^' if negated else ''}{inner}]", position + 1


def _bound(segment: str, position: int) -> tuple[str, int]:
    if position >= len(segment) or segment[position] in "-]":
        raise BadPattern(segment)
    character, position = _plain(segment, position)
    if position >= len(segment):
        raise BadPattern(segment)
    return character, position
