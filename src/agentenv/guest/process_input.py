"""A process's standard input: a pipe or a terminal that is written without blocking the agent."""

from __future__ import annotations

import os

from agentenv.guest import loop


class InputClosed(Exception):
    """Nothing can be written any more: closed by a client, or the process reads no more."""


class Input:
    """Writes in the order of the calls; each waits until the process has room for it.

    Args:
        fd: non-blocking.
        owned: whether `close` closes the descriptor (a terminal's is its output's).
    """

    __slots__ = ("_fd", "_free", "_owned", "_room", "_turns", "_watched", "closed")

    def __init__(self, fd: int, owned: bool) -> None:
        self._fd = fd
        self._owned = owned
        self._watched = not owned  # a terminal's descriptor is watched by its output
        self._room = loop.Event()
        self._turns: list[object] = []
        self._free = loop.Event()
        self.closed = False

    def on_room(self) -> None:
        """The descriptor takes bytes again."""
        self._room.set()

    async def write(self, data: bytes) -> None:
        """Writes all of `data`.

        Raises:
            InputClosed: the input is closed, or was before everything was taken.
        """
        await self._turn()
        try:
            view = memoryview(data)
            while len(view):
                if self.closed:
                    raise InputClosed("the standard input is closed")
                self._room.clear()
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:
                    if not self._watched:
                        self._watched = True
                        loop.watch(self._fd, lambda _events: self.on_room())
                    await self._room.wait()
                except OSError as error:
                    raise InputClosed(f"the process does not read its input: {error.strerror}") from error
        finally:
            self._pass_on()

    async def finish(self) -> None:
        """Closes after everything that was begun has been written."""
        await self._turn()
        self._pass_on()
        self.close()

    def close(self) -> None:
        """Closes at once; nothing, when it is closed already."""
        if self.closed:
            return
        self.closed = True
        if self._owned:
            if self._watched:
                loop.unwatch(self._fd)
            os.close(self._fd)
        self._room.set()

    async def _turn(self) -> None:
        mine = object()
        self._turns.append(mine)
        try:
            while self._turns[0] is not mine:
                self._free.clear()
                await self._free.wait()
        except BaseException:
            self._turns.remove(mine)
            self._free.set()
            raise

    def _pass_on(self) -> None:
        del self._turns[0]
        self._free.set()
