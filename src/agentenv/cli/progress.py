"""Progress for people: a line per step, with the time it took, and below them how far what is done now is."""

from __future__ import annotations

import time
from types import TracebackType

import click

from agentenv.cli.meter import Line
from agentenv.progress import Advance


class Steps:
    """Prints each message with the seconds since the command began; advances share a line that goes with the
    block."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._begun = time.monotonic()
        self._line = Line(quiet=quiet)
        self._under_way: dict[str, Advance] = {}

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.clear()

    def __call__(self, message: str) -> None:
        if isinstance(message, Advance):
            self._advance(message)
        elif not self._quiet:
            self._line.clear()
            click.echo(f"[{time.monotonic() - self._begun:6.1f} s] {message}", err=True)

    def _advance(self, one: Advance) -> None:
        self._under_way[one.what] = one
        if one.done == one.total:
            del self._under_way[one.what]
        if self._under_way:
            self._line.show(" | ".join(self._under_way.values()))
        else:
            self._line.clear()
