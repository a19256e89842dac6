"""A process's output: read as it comes, given to every subscriber, bounded in memory.

A stream is read only while every subscriber has room, so a slow reader slows the process down, as a
slow terminal would. Without subscribers output is read and dropped, so that a process never hangs
because its client went away.
"""

from __future__ import annotations

import os
from binascii import b2a_base64

from agentenv.guest import loop
from agentenv.guest.lean import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Item = tuple[str, bytes]

READ = 64 * 1024  # what a pipe holds
ROOM = 256 * 1024  # bytes that wait for one subscriber before the process has to
_MERGE = 64 * 1024
_TURN_READS = 16  # of one stream before others get a turn


class Subscription:
    """One client's view of a process: what was written since it subscribed, in order, then the end."""

    __slots__ = ("_items", "_on_room", "_size", "_wake", "closed")

    def __init__(self, on_room: Callable[[], object]) -> None:
        self._items: deque[Item] = deque()
        self._size = 0
        self._wake = loop.Event()
        self._on_room = on_room
        self.closed = False

    @property
    def full(self) -> bool:
        return self._size >= ROOM

    def put(self, stream: str, data: bytes) -> None:
        """Appends output; the reader wakes up."""
        self._items.append((stream, data))
        self._size += len(data)
        self._wake.set()

    def close(self) -> None:
        """Nothing more will come: the process has ended."""
        self.closed = True
        self._wake.set()

    async def take(self, timeout: float) -> Item | None:
        """The next output, neighbours of one stream joined; None at the end.

        Raises:
            TimeoutError: nothing came for `timeout` seconds.
        """
        while not self._items:
            if self.closed:
                return None
            self._wake.clear()
            if not await self._wake.wait(timeout):
                raise TimeoutError
        was_full = self.full
        stream, data = self._items.popleft()
        if self._items and self._items[0][0] == stream:
            parts, size = [data], len(data)
            while self._items and self._items[0][0] == stream and size < _MERGE:
                parts.append(self._items.popleft()[1])
                size += len(parts[-1])
            data = b"".join(parts)
        self._size -= len(data)
        if was_full and not self.full:
            self._on_room()
        return stream, data


class Output:
    """The reading end of one stream.

    Args:
        fd: non-blocking; closed by this object at the stream's end.
        congested: whether reading has to wait.
        publish: takes what was read.
        on_end: called once, when the stream is at its end.
    """

    __slots__ = ("_congested", "_left", "_on_end", "_paused", "_publish", "_writable", "fd", "name", "open")

    def __init__(
        self,
        name: str,
        fd: int,
        congested: Callable[[], bool],
        publish: Callable[[str, bytes], object],
        on_end: Callable[[], object],
    ) -> None:
        self.name = name
        self.fd = fd
        self.open = True
        self._congested = congested
        self._publish: Callable[[str, bytes], object] | None = publish
        self._on_end = on_end
        self._paused = False
        self._left: int | None = None
        self._writable: Callable[[], object] | None = None
        loop.watch(fd, self._on_events)

    @property
    def drained(self) -> bool:
        """Whether all that was there at `mark` has been published."""
        return not self.open or (self._left is not None and self._left <= 0)

    def mark(self, size: int) -> None:
        """The process has ended and `size` bytes of what it wrote are still unread."""
        self._left = size

    def forget(self) -> None:
        """From now on, what comes is dropped: it is some other process's, in the background."""
        self._publish = None
        self.resume()

    def on_writable(self, callback: Callable[[], object]) -> None:
        """Also reports when the descriptor, a terminal, takes input again."""
        self._writable = callback

    def resume(self) -> None:
        """Goes on reading after a pause."""
        if self._paused:
            self._paused = False
            self.pump()

    def pump(self) -> None:
        """Reads what is there, as long as there is room for it."""
        reads = 0
        while self.open:
            publish = self._publish
            if publish is not None and self._congested():
                self._paused = True
                return
            if reads == _TURN_READS:
                loop.call_later(0, self.pump)
                return
            reads += 1
            try:
                data = os.read(self.fd, READ)
            except BlockingIOError:
                return
            except OSError:  # a terminal whose last program has gone answers EIO
                data = b""
            if not data:
                self.close()
                return
            if publish is not None:
                publish(self.name, data)
                if self._left is not None:
                    self._left -= len(data)
                    if self._left <= 0:
                        self._on_end()

    def close(self) -> None:
        """Closes the descriptor; the stream is over."""
        if self.open:
            self.open = False
            loop.unwatch(self.fd)
            os.close(self.fd)
            self._on_end()

    def _on_events(self, events: int) -> None:
        if self._writable is not None:
            self._writable()
        if not self._paused:
            self.pump()


def data_event(stream: str, data: bytes) -> tuple[bytes, ...]:
    """The JSON of a data event in pieces; made by hand, since output can be large."""
    return b'{"event":{"data":{"%b":"' % stream.encode(), b2a_base64(data, newline=False), b'"}}}'
