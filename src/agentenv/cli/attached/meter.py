"""How far a transfer is, for people who watch: part, rate and time that is left, on one line."""

from __future__ import annotations

import sys
import time
from types import TracebackType

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
            sys.stderr.write(f"\r{line(self._done, self._size, now - self._begun)}\x1b[K")
            sys.stderr.flush()


def line(done: int, size: int, seconds: float) -> str:
    """What is shown for so many bytes of so many (-1: nobody knows) after so long."""
    rate = done / seconds if seconds else 0.0
    text = f"{readable(done)}"
    if size > 0:
        text = f"{min(100, done * 100 // size):3d} %  {text} of {readable(size)}"
    text += f"  {readable(rate)}/s"
    if size > done and rate:
        left = int((size - done) / rate)
        text += f"  {left // 60}:{left % 60:02d} left"
    return text


def readable(size: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
