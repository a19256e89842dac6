"""Progress for people: a line per step, with the time it took."""

from __future__ import annotations

import time

import click


class Steps:
    """Prints each message with the seconds since the command began."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._begun = time.monotonic()

    def __call__(self, message: str) -> None:
        if not self._quiet:
            click.echo(f"[{time.monotonic() - self._begun:6.1f} s] {message}", err=True)
