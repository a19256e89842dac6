"""Collects the exit status of every child, the agent's own and the strangers it inherits.

Only this module waits for processes. A child that was announced with `expect` has its status handed
over; any other (a daemon whose parent died, given to process 1) is reaped and forgotten. A child cannot
be missed: it is announced in the same turn of the loop that starts it, and reaping happens in another.
"""

from __future__ import annotations

import os

from agentenv.guest import loop
from agentenv.guest.lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_expected: dict[int, Callable[[int], object]] = {}


def start() -> None:
    """Begins to reap; to be called once, inside the loop."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def on_child(_events: int) -> None:
        try:
            while os.read(reading, 4096):
                pass
        except BlockingIOError:
            pass
        reap()

    loop.watch(reading, on_child)
    reap()  # who died before the handler was there sends no signal any more


def expect(pid: int, callback: Callable[[int], object]) -> None:
    """Hands the wait status of `pid` to `callback` once it has ended."""
    _expected[pid] = callback


def reap() -> None:
    """Collects every child that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        callback = _expected.pop(pid, None)
        if callback is not None:
            callback(status)
