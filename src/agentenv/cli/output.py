"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, cast

import click

Form = Literal["table", "json", "ids"]
Row = dict[str, Any]
Column = tuple[str, Callable[[Row], object]]

F = TypeVar("F", bound=Callable[..., Any])

_STATES = {"running": "green", "ready": "green", "paused": "yellow", "building": "yellow", "error": "red"}


def form_option(function: F) -> F:
    """`--output table|json|ids`: a table on a terminal, else JSON, where nothing is said; see `form_of`."""
    return click.option(
        "--output",
        "-o",
        "form",
        type=click.Choice(["table", "json", "ids"]),
        help="Form of the answer (a table on a terminal, else JSON).",
    )(function)


def form_of(asked: str | None) -> Form:
    """The form that is asked for, or that fits where the output goes."""
    return cast("Form", asked) if asked else "table" if sys.stdout.isatty() else "json"


def show(rows: Sequence[Row], columns: Sequence[Column], form: Form, *, key: str) -> None:
    """Print rows. As a table they have `columns`; as ids, the field `key` of each."""
    if form == "json":
        click.echo(json.dumps(list(rows), indent=2))
    elif form == "ids":
        for row in rows:
            click.echo(row[key])
    else:
        click.echo(table([name for name, _ in columns], [[read(row) for _, read in columns] for row in rows]))


def show_one(found: Any, form: Form, *, key: str) -> None:
    """Print one object: its fields a line each, or as it is."""
    if form == "json":
        click.echo(json.dumps(found, indent=2))
    elif form == "ids":
        click.echo(found[key])
    else:
        width = max(len(name) for name in found)
        for name, value in found.items():
            if value is not None:
                text = value if isinstance(value, str) else json.dumps(value)
                click.echo(f"{name.ljust(width)}  {coloured(text)}")


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns below their titles, a line for each row."""
    lines = [[title.upper() for title in titles], *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    return "\n".join(
        "  ".join(coloured(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(value: object) -> str:
    return "-" if value in (None, "", {}, []) else str(value)


def coloured(text: str, width: int = 0) -> str:
    """The text, in its colour where it is a state and colours are wanted (https://no-color.org)."""
    colour = _STATES.get(text) if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else None
    return click.style(text.ljust(width), fg=colour) if colour else text.ljust(width)


def age(moment: str | None, now: datetime | None = None) -> str:
    """How long ago a moment (RFC 3339) was, or `in` how long it will be."""
    if not moment:
        return ""
    seconds = ((now or datetime.now(UTC)) - datetime.fromisoformat(moment)).total_seconds()
    text = duration(abs(seconds))
    return text if seconds >= 0 else f"in {text}"


def duration(seconds: float) -> str:
    """Seconds in the largest unit that they fill."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def pairs(mapping: dict[str, Any] | None) -> str:
    """A mapping on one line."""
    return " ".join(f"{name}={value}" for name, value in sorted((mapping or {}).items()))
