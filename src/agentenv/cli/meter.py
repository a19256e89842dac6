"""How far something is, for people who watch: part, rate and time that is left, on one line of stderr."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import click

from agentenv.amounts import progress

AFTER_S = 1.0  # what is over by then shows nothing
EVERY_S = 0.2
PLAIN_EVERY_S = 10.0


class Line:
    """A line that each text takes the place of, gone with the block; where there is no terminal, one now and
    then that stays."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet, self._terminal = quiet, sys.stderr.isatty()
        self._every_s = EVERY_S if self._terminal else PLAIN_EVERY_S
        self._visible = False
        self.anew()

    def __enter__(self) -> Line:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def anew(self) -> None:
        """Something begins."""
        self._next = time.monotonic() + (AFTER_S if self._terminal else PLAIN_EVERY_S)

    def due(self) -> bool:
        """Whether it is time for another text."""
        return not self._quiet and time.monotonic() >= self._next

    def show(self, text: str) -> None:
        """Show a text if it is time."""
        if not self.due():
            return
        self._next = time.monotonic() + self._every_s
        if not self._terminal:
            click.echo(text, err=True)
            return
        self.draw(text)

    def draw(self, text: str) -> None:
        """Show a text on a terminal now."""
        self._visible = True
        sys.stderr.write(f"\r{text[: shutil.get_terminal_size().columns - 1]}\x1b[K")
        sys.stderr.flush()

    def clear(self) -> None:
        """Have the line free for something else."""
        if self._visible:
            self._visible = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on a terminal what is waited for, once that has lasted a second; the word goes with the block."""
    if not sys.stderr.isatty():
        yield
        return
    from threading import Timer  # which --help has no use for

    line = Line()
    word = Timer(AFTER_S, line.draw, [f"{what} …"])
    word.daemon = True
    word.start()
    try:
        yield
    finally:
        word.cancel()
        word.join()  # it may be about to draw
        line.clear()


class TransferMeter:
    """Shows how far a transfer is that lasts longer than a second."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._line = Line(quiet=quiet)
        self._begun = time.monotonic()
        self._size = -1
        self._done = 0

    def __enter__(self) -> TransferMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.clear()

    def total(self, files: int, size: int) -> None:
        """So many files and bytes are to come; -1: nobody knows. It begins anew."""
        self._size, self._done = size, 0
        self._begun = time.monotonic()
        self._line.anew()

    def add(self, size: int) -> None:
        """So many more bytes are done."""
        self._done += size
        if self._line.due():
            self._line.show(progress(self._done, self._size, time.monotonic() - self._begun))
