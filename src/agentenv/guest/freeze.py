"""The disks at rest while the host captures them alone: written out and frozen, then thawed.

Whoever writes to a frozen filesystem waits in the kernel until it is thawed, and this agent, which has one
thread, writes for its clients. So it is a child that freezes and thaws: as soon as the connection over which
it was asked for is closed, when the agent says so or is gone, and after some seconds in any case. The child
itself touches nothing of the filesystem: its program and modules are on the tools drive.
"""

from __future__ import annotations

import fcntl
import os
import select

from agentenv.guest import drives, loop
from agentenv.guest.lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

LIMIT_S = 10.0
ROOT_SERIAL = "root"

_FIFREEZE = 0xC0045877  # _IOWR('X', 119, int), linux/fs.h
_FITHAW = 0xC0045878  # _IOWR('X', 120, int)
_FROZEN, _THAWED = b"f", b"t"
_ENDED = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def root() -> int | None:
    """The root directory, open, if its filesystem is on the disk that the host captures; else None.

    Nothing else is ever frozen: an agent may run, and be tried out, on a machine that is not its own.
    """
    device = os.stat("/").st_dev
    try:
        with open(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/serial") as file:
            ours = file.read().strip() == ROOT_SERIAL
    except OSError:
        return None
    return os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if ours else None


def captured() -> list[int]:
    """A directory, open, of each filesystem that the host captures: the root disk's, and those of drives."""
    found = root()
    if found is None:
        return []
    places = [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for path in drives.written()]
    return [*places, found]


def freeze(directory: int) -> bool:
    """Write a filesystem out and let nobody write to it; False where it cannot be, or is frozen already."""
    try:
        fcntl.ioctl(directory, _FIFREEZE, 0)
        return True
    except OSError:  # EOPNOTSUPP: this kind never can
        return False


def thaw(directory: int) -> None:
    """Let a frozen filesystem be written to again; nothing, when it is not frozen."""
    try:
        fcntl.ioctl(directory, _FITHAW, 0)
    except OSError:  # EINVAL: it was thawed by somebody else
        pass


class Freezer:
    """Freezes for one connection at a time.

    Args:
        find: opens what is to be frozen; nothing, where everything is only written out.
        limit: seconds after which it is thawed whatever happens.
    """

    def __init__(self, find: Callable[[], Sequence[int]] = captured, limit: float = LIMIT_S) -> None:
        self._find = find
        self._limit = limit
        self._control = -1  # once it is closed, the child thaws and ends
        self._over = loop.Event()
        self._over.set()

    async def freeze(self, connection: int) -> None:
        """Returns when everything is written out, and frozen where it can be."""
        await self.thaw()
        directories = self._find()
        told, telling = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        held, self._control = os.pipe2(os.O_CLOEXEC)
        if os.fork() == 0:
            _child(directories, connection, held, telling, self._limit)
        os.close(telling)
        os.close(held)
        ready, self._over = loop.Event(), loop.Event()
        said = b""

        def on_word(_events: int) -> None:
            nonlocal said
            try:
                while word := os.read(told, 16):
                    said += word
                    ready.set()
            except BlockingIOError:
                return
            loop.unwatch(told)
            os.close(told)
            self.release()
            for directory in directories:
                if said == _FROZEN:  # the child was killed
                    thaw(directory)
                os.close(directory)
            ready.set()
            self._over.set()

        loop.watch(told, on_word)
        on_word(0)
        await ready.wait()

    def release(self) -> None:
        """Have it thawed, without waiting for that."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    async def thaw(self) -> None:
        """Returns when it is thawed."""
        self.release()
        await self._over.wait()


def _child(directories: Sequence[int], connection: int, held: int, telling: int, limit: float) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        kept = {*directories, connection, held, telling, 0, 1, 2}
        for name in os.listdir("/proc/self/fd"):  # clients are to see their connections end
            if int(name) not in kept:
                try:
                    os.close(int(name))
                except OSError:  # the listing's own
                    pass
        os.sync()
        frozen = [directory for directory in directories if freeze(directory)]
        os.write(telling, _FROZEN if frozen else _THAWED)
        if frozen:
            waiting = select.poll()
            waiting.register(connection, _ENDED)
            waiting.register(held, _ENDED)
            waiting.poll(limit * 1000)
            for directory in frozen:
                thaw(directory)
            os.write(telling, _THAWED)
    finally:
        os._exit(0)
