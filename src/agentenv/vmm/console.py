"""The guest's serial console: read from the hypervisor's socket into a bounded file."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

_MARK = b"\n[... %d bytes left out ...]\n"
_MARK_FORM = re.compile(rb"\n\[\.\.\. (\d+) bytes left out \.\.\.\]\n")

# The hypervisor writes byte by byte. Reading at most so often keeps a chatty guest from taking the
# node's processor: during the boot a short pause (the guest waits when its buffer is full, about
# 300 bytes), afterwards a longer one.
_EARLY_PAUSE_S = 0.004
_LATE_PAUSE_S = 0.01
_EARLY_BYTES = 65536


class SerialLog:
    """A text file of at most `limit` bytes: the beginning, a mark of what is missing, the end.

    Continues a file that is there. When it is full, the newest half of what follows the head is kept,
    so each byte is rewritten about once.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._limit = limit
        self._head = limit // 4
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def append(self, data: bytes) -> None:
        """Add to the end. What the disk has no room for is lost: a log must not stop a machine."""
        try:
            if self._size + len(data) > self._limit:
                self._shorten(data)
            else:
                self._write(data, self._size)
        except OSError:
            return

    def tail(self, length: int) -> bytes:
        """The last bytes, at most `length`."""
        if self._descriptor < 0:
            return b""
        return os.pread(self._descriptor, length, max(0, self._size - length))

    def close(self) -> None:
        """Close the file. Repeatable."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _shorten(self, data: bytes) -> None:
        whole = os.pread(self._descriptor, self._size, 0) + data
        head, rest, missing = whole[: self._head], whole[self._head :], 0
        mark = _MARK_FORM.match(rest)
        if mark:
            missing, rest = int(mark[1]), rest[mark.end() :]
        keep = rest[-(self._limit // 4) :]
        missing += len(rest) - len(keep)
        self._write(head + _MARK % missing + keep, 0)
        os.ftruncate(self._descriptor, self._size)

    def _write(self, data: bytes, offset: int) -> None:
        self._size = offset + os.pwrite(self._descriptor, data, offset)


class Console:
    """Copies a console socket into a log until the other side closes or `close` is called."""

    def __init__(self, connection: socket.socket, log: SerialLog) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._log = log
        self._seen = 0
        self._pause: asyncio.TimerHandle | None = None
        self._open = True
        self.listener: Callable[[bytes], None] | None = None
        self._loop.add_reader(connection, self._readable)

    def tail(self, length: int = 2048) -> str:
        """The last of what the guest wrote, at most `length` bytes."""
        return self._log.tail(length).decode(errors="replace")

    def send(self, text: bytes) -> None:
        """Type something; what the port's buffers have no room for is lost, as on a real line."""
        if self._open:
            try:
                self._socket.send(text)
            except OSError:
                return

    def drain(self) -> None:
        """Take over what has arrived, without a pause; for the end of a machine."""
        while self._open and self._receive():
            pass

    def close(self) -> None:
        """Stop reading; the hypervisor drops what nobody reads. Repeatable."""
        self._stop()
        self._log.close()

    def _readable(self) -> None:
        if not self._receive():
            return
        self._loop.remove_reader(self._socket)
        pause = _EARLY_PAUSE_S if self._seen < _EARLY_BYTES else _LATE_PAUSE_S
        self._pause = self._loop.call_later(pause, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if self._open:
            self._loop.add_reader(self._socket, self._readable)

    def _receive(self) -> bool:
        """Take one portion; False when there is none or there will be no more."""
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return False
        except OSError:  # reset: the hypervisor is gone
            data = b""
        if not data:
            self._stop()
            return False
        self._seen += len(data)
        self._log.append(data)
        if self.listener is not None:
            self.listener(data)
        return True

    def _stop(self) -> None:
        if not self._open:
            return
        self._open = False
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
