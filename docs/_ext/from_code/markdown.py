"""Pieces of Markdown, made of values. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`+)(?!`)(.*?)(?<!`)\1(?!`)", re.DOTALL)
_MEANT = re.compile(r"([\\*<>\[\]])")


def prose(text: str) -> str:
    """Text of the code's as Markdown: code spans stay, other signs mean nothing but themselves."""
    parts, last = [], 0
    for found in _CODE.finditer(text):
        parts += [_MEANT.sub(r"\\\1", text[last : found.start()]), found[0]]
        last = found.end()
    return "".join([*parts, _MEANT.sub(r"\\\1", text[last:])])


def code(text: object) -> str:
    """A code span; one whose text has backticks gets longer ends."""
    value = str(text).replace("\n", " ")
    longest = max((len(run) for run in re.findall(r"`+", value)), default=0)
    if not longest:
        return f"`{value}`"
    ends = "`" * (longest + 1)
    return f"{ends} {value} {ends}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with an empty line after it, or nothing where there are no rows."""
    body = [_row(row) for row in rows]
    if not body:
        return ""
    return "\n".join([_row(header), _row(["---"] * len(header)), *body]) + "\n\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(each.split()).replace("|", "\\|") for each in cells) + " |"


def block(text: str, language: str = "text") -> str:
    """A fenced block with an empty line after it."""
    return f"```{language}\n{text.rstrip()}\n```\n\n"


def heading(level: int, text: str, target: str | None = None) -> str:
    """A heading; `target` is a name for links from other pages, as `[...](#target)`."""
    before = f"({target})=\n" if target else ""
    return f"{before}{'#' * level} {text}\n\n"
