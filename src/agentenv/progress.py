"""How far something is, as it is told to who waits: in words, and in numbers for who draws them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

from agentenv import amounts

Progress = Callable[[str], None]
"""Is told in a few words what is being done; with an `Advance`, how far it is."""


def silent(text: str) -> None:
    """For those who do not care."""


EVERY_S = 0.5  # how often a tally tells
SELDOM_S = 2.0


class Advance(str):
    """How far one thing is, in words: the next of the same thing takes its place.

    Args:
        what: the thing.
        done: bytes.
        total: bytes; -1: nobody knows.
        seconds: that it took so far.
    """

    __slots__ = ("done", "seconds", "total", "what")
    what: str
    done: int
    total: int
    seconds: float

    def __new__(cls, what: str, done: int, total: int, seconds: float) -> Self:
        self = super().__new__(cls, f"{what}: {amounts.progress(done, total, seconds)}")
        self.what, self.done, self.total, self.seconds = what, done, total, seconds
        return self


def document(text: str) -> dict[str, Any]:
    """What is told, for another process; see `from_document`."""
    if isinstance(text, Advance):
        return {"what": text.what, "done": text.done, "total": text.total, "seconds": text.seconds}
    return {"text": text}


def from_document(values: Mapping[str, Any]) -> str:
    """The inverse of `document`."""
    return str(values["text"]) if "text" in values else Advance(**values)


class Tally:
    """Counts bytes of one thing and tells from time to time how far it is; of what is over at once, nothing.

    Args:
        what: the thing.
        total: bytes; -1: nobody knows.
        progress: is told.
        clock: gives seconds.
    """

    def __init__(
        self, what: str, total: int, progress: Progress, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._total, self._progress, self._clock = what, total, progress, clock
        self._done = 0
        self._begun = clock()
        self._told = self._begun

    def add(self, size: int) -> None:
        """So many more bytes are done."""
        self.reach(self._done + size)

    def reach(self, done: int) -> None:
        """So many bytes are done in all."""
        self._done = done
        now = self._clock()
        spoken = self._told > self._begun
        if now - self._told >= EVERY_S or (spoken and done == self._total):
            self._told = now
            self._progress(Advance(self._what, done, self._total, now - self._begun))


class Seldom:
    """Passes on what it is told, of advances only some: for logs that are kept."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._clock = progress, clock
        self._next = clock() + SELDOM_S

    def __call__(self, text: str) -> None:
        if isinstance(text, Advance):
            if (now := self._clock()) < self._next:
                return
            self._next = now + SELDOM_S
        self._progress(text)


class Readable(Protocol):
    """What can be read."""

    def read(self, size: int = -1, /) -> bytes:
        """See `IO.read`."""


class Counted:
    """A file of which is told how many bytes are read."""

    def __init__(self, file: Readable, count: Callable[[int], None]) -> None:
        self._file, self._count = file, count

    def read(self, size: int = -1, /) -> bytes:
        """See `IO.read`."""
        data = self._file.read(size)
        self._count(len(data))
        return data
