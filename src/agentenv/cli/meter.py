"""How far a transfer is, for people who watch: part, rate and time that is left, on one line."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import IO

from agentenv.amounts import progress

AFTER_S = 1.0  # what is over by then shows nothing
EVERY_S = 0.2


class TransferMeter:
    """Shows a line while a transfer lasts longer than a second, on a terminal alone; gone with the block."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._shows = not quiet and sys.stderr.isatty()
        self._begun = self._shown = time.monotonic()
        self._size = -1
        self._done = 0
        self._visible = False

    def __enter__(self) -> TransferMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._visible:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def total(self, files: int, size: int) -> None:
        """So many files and bytes are to come; -1: nobody knows. It begins anew."""
        self._size, self._done = size, 0
        self._begun = time.monotonic()

    def add(self, size: int) -> None:
        """So many more bytes are done."""
        self._done += size
        now = time.monotonic()
        if self._shows and now - self._begun > AFTER_S and now - self._shown > EVERY_S:
            self._shown, self._visible = now, True
            sys.stderr.write(f"\r{progress(self._done, self._size, now - self._begun)}\x1b[K")
            sys.stderr.flush()


class Metered:
    """A file that tells a meter what is read of it."""

    def __init__(self, file: IO[bytes], meter: TransferMeter) -> None:
        self._file, self._meter = file, meter

    def read(self, size: int = -1) -> bytes:
        """See `IO.read`."""
        data = self._file.read(size)
        self._meter.add(len(data))
        return data
