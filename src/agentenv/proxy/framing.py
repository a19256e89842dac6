"""Where an HTTP/1.1 message's body ends, told from its bytes as they come (RFC 9112, sections 6 and 7).

The readers do not decode: bytes are relayed as they were sent, and a reader only says how many of
them still belong to the message. They are strict, because a length that two parties read
differently lets one request hide in another.
"""

from __future__ import annotations

import re
from typing import Protocol

from agentenv.errors import InvalidRequest

CHUNK_LINE_LIMIT = 4096
TRAILER_LIMIT = 16 * 1024

_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_CHUNK_LINE_BEGUN = re.compile(rb"[0-9A-Fa-f]{1,15}(?:;[\t\x20-\x7e\x80-\xff]*)?\r?")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")


class Malformed(InvalidRequest):
    """The bytes are not HTTP/1.1 as this proxy accepts it; what follows them cannot be trusted."""

    code = "malformed"


class Body(Protocol):
    """A body on its way."""

    done: bool

    def feed(self, data: bytes) -> int:
        """How many of these bytes, from the first, belong to the body; `done` is set at its end.

        Raises:
            Malformed: the framing is wrong; nothing of the connection can be used any more.
        """


class Sized:
    """A body of a known number of bytes (more than 0)."""

    def __init__(self, length: int) -> None:
        self.remaining = length
        self.done = length == 0

    def feed(self, data: bytes) -> int:
        """See `Body.feed`."""
        taken = min(self.remaining, len(data))
        self.remaining -= taken
        self.done = self.remaining == 0
        return taken


class UntilClose:
    """A body that ends when its sender closes; also either way of a connection that was upgraded."""

    def __init__(self) -> None:
        self.done = False  # for good: only the end of the connection is its end

    def feed(self, data: bytes) -> int:
        """See `Body.feed`."""
        return len(data)


class Chunked:
    """A body in chunks, with its trailer section."""

    def __init__(self) -> None:
        self.done = False
        self._data_left = 0  # of the chunk that is being passed
        self._line = bytearray()  # a line that has not ended yet
        self._read = self._size  # what to do with the next whole line
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> int:
        """See `Body.feed`."""
        position, end = 0, len(data)
        while position < end and not self.done:
            if self._data_left:
                step = min(self._data_left, end - position)
                self._data_left -= step
                position += step
            else:
                position = self._feed_line(data, position)
        return position

    def _feed_line(self, data: bytes, position: int) -> int:
        newline = data.find(b"\n", position)
        if newline < 0:
            self._line += data[position:]
            self._check_unfinished()
            return len(data)
        line = data[position : newline + 1]
        if self._line:
            line = bytes(self._line) + line
            self._line.clear()
        self._read(line)
        return newline + 1

    def _check_unfinished(self) -> None:
        if self._read == self._data_end:
            if self._line != b"\r":
                raise Malformed("a chunk is longer than its size says")
        elif self._read == self._size and _CHUNK_LINE_BEGUN.fullmatch(self._line) is None:
            raise Malformed("the size line of a chunk is malformed")
        elif len(self._line) > CHUNK_LINE_LIMIT:
            raise Malformed(f"a line of a chunked body is longer than {CHUNK_LINE_LIMIT} bytes")

    def _size(self, line: bytes) -> None:
        match = _CHUNK_LINE.fullmatch(line)
        if match is None or len(line) > CHUNK_LINE_LIMIT:
            raise Malformed("the size line of a chunk is malformed")
        self._data_left = int(match[1], 16)
        self._read = self._data_end if self._data_left else self._trailer

    def _data_end(self, line: bytes) -> None:
        if line != b"\r\n":
            raise Malformed("a chunk is longer than its size says")
        self._read = self._size

    def _trailer(self, line: bytes) -> None:
        self._trailer_bytes += len(line)
        if line == b"\r\n":
            self.done = True
        elif _TRAILER_LINE.fullmatch(line) is None or len(line) > CHUNK_LINE_LIMIT:
            raise Malformed("a trailer line is malformed")
        elif self._trailer_bytes > TRAILER_LIMIT:
            raise Malformed(f"the trailer section is longer than {TRAILER_LIMIT} bytes")
