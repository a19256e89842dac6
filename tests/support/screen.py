"""A pseudo-terminal with a program in it, as a person at a terminal would use it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

LIMIT_S = 60.0


class Screen:
    """The program is killed with the block, if it has not ended.

    Attributes:
        shown: all that the program wrote so far.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], size: tuple[int, int] = (80, 24)
    ) -> None:
        self._terminal, theirs = pty.openpty()
        set_size(self._terminal, *size)
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.shown = b""
        self._seen = 0
        self.process = subprocess.Popen(
            command, env=dict(environment), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._terminal)
        os.close(self._theirs)

    def type(self, data: bytes) -> None:
        """Type it all; what the program shows meanwhile is taken."""
        while data:
            readable, writable, _ = select.select([self._terminal], [self._terminal], [])
            if readable:
                self.shown += os.read(self._terminal, 65536)
            if writable:
                data = data[os.write(self._terminal, data[:512]) :]

    def wait_for(self, text: bytes) -> bytes:
        """Wait until that is shown after what was waited for before; all in between."""
        limit = time.monotonic() + LIMIT_S
        while (at := self.shown.find(text, self._seen)) < 0:
            left = limit - time.monotonic()
            if left <= 0 or not select.select([self._terminal], [], [], left)[0]:
                raise AssertionError(f"{text!r} was not shown, but {self.shown[self._seen :]!r}")
            self.shown += os.read(self._terminal, 65536)
        found, self._seen = self.shown[self._seen : at], at + len(text)
        return found

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size, and tell the program: it is not its controlling terminal."""
        set_size(self._terminal, columns, rows)
        self.process.send_signal(signal.SIGWINCH)

    def end(self) -> int:
        """Wait until the program has ended; its status. The terminal is as it was before."""
        status = self.process.wait(LIMIT_S)
        after = termios.tcgetattr(self._theirs)
        pending = 0o40000  # a mark of the driver's own
        assert [*after[:3], after[3] & ~pending, *after[4:]] == [
            *self.before[:3],
            self.before[3] & ~pending,
            *self.before[4:],
        ]
        while select.select([self._terminal], [], [], 0)[0]:
            self.shown += os.read(self._terminal, 65536)
        return status


def set_size(terminal: int, columns: int, rows: int) -> None:
    """Give a terminal a size."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
