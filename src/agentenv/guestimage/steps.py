"""Telling whoever waits what is being done, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Report:
    """A step began, ended, or was not needed. `seconds` is how long it took (0 when it begins)."""

    step: str
    state: Literal["begun", "done", "unchanged", "failed"]
    seconds: float = 0.0
    detail: str = ""


Progress = Callable[[Report], None]


def silent(report: Report) -> None:
    """A progress callback for those who do not care."""


@dataclass
class Step:
    """A step in progress; set `detail` to what came of it, and `changed` to False if nothing did."""

    detail: str = ""
    changed: bool = field(default=True)


def begin(name: str, progress: Progress) -> None:
    """Report that a step now really does something."""
    progress(Report(name, "begun"))


@contextmanager
def step(name: str, progress: Progress) -> Iterator[Step]:
    """Report a step's end around what the block does; `begin` reports its beginning."""
    start = time.monotonic()
    current = Step()
    try:
        yield current
    except BaseException as error:
        progress(Report(name, "failed", time.monotonic() - start, str(error)))
        raise
    state: Literal["done", "unchanged"] = "done" if current.changed else "unchanged"
    progress(Report(name, state, time.monotonic() - start, current.detail))
