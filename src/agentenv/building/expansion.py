"""Variables in a step's arguments, as a Dockerfile has them: `$NAME`, `${NAME}`, `${NAME:-word}`,
`${NAME:+word}` and the two without colons; a backslash before a dollar takes its meaning from it."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PATTERN = re.compile(
    rf"\\(?P<escaped>\$)|\$(?P<plain>{_NAME})|\$\{{(?P<braced>{_NAME})(?:(?P<rule>:?[-+])(?P<word>[^}}]*))?\}}"
)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """The text with its variables' values; one that is not set is empty."""

    def value(found: re.Match[str]) -> str:
        if found["escaped"]:
            return "$"
        name = found["plain"] or found["braced"]
        known = variables.get(name)
        rule = found["rule"]
        if not rule:
            return known or ""
        there = bool(known) if rule.startswith(":") else known is not None
        word = found["word"]
        if rule.endswith("-"):
            return known or "" if there else expand(word, variables)
        return expand(word, variables) if there else ""

    return _PATTERN.sub(value, text)
