"""The event loop: one epoll, coroutines and timers, nothing more.

`import asyncio` costs about 80 ms on a host and several times that under emulation, and its loop runs
a lot of code between a readable socket and the code that waits for it. This loop is the little that
the agent needs. One loop per process; its state is this module's.

Rules that keep it small:
- Descriptors are watched edge-triggered: after an event, read or write until `BlockingIOError`.
- A wake-up may be spurious: whoever suspends looks again at what it waits for.
- A `watch` callback opens no descriptor: a number closed earlier in the same batch of events could
  come back and get the dead one's event. It wakes a task that opens it.
"""

from __future__ import annotations

import select
import sys
import time

from agentenv.guest.lean import deque, heapify, heappop, heappush

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from typing import Any

now = time.monotonic
EDGE = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
GONE = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
_COMPACT_ABOVE = 256


class Cancelled(BaseException):
    """Thrown into a task, at its await, by `Task.cancel`."""


class _Suspension:
    """`await SUSPEND` gives way until something wakes the current task."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, None]:
        yield


SUSPEND = _Suspension()


class Task:
    """A running coroutine."""

    __slots__ = ("_cancelled", "_coroutine", "_joiners", "_scheduled", "done")

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._scheduled = True
        self._cancelled = False
        self._joiners: list[Task] = []
        self.done = False
        _ready.append(self)

    def wake(self) -> None:
        """Lets the task go on in this turn of the loop."""
        if not self._scheduled and not self.done:
            self._scheduled = True
            _ready.append(self)

    def cancel(self) -> None:
        """Throws `Cancelled` into the task at its await; nothing, when it is done."""
        if not self.done:
            self._cancelled = True
            self.wake()

    async def join(self) -> None:
        """Waits until the task has ended, however it ended."""
        task = current()
        while not self.done:
            self._joiners.append(task)
            try:
                await SUSPEND
            finally:
                self._joiners.remove(task)

    def _step(self) -> None:
        global _current
        self._scheduled = False
        _current = self
        try:
            if self._cancelled:
                self._cancelled = False
                self._coroutine.throw(Cancelled())
            else:
                self._coroutine.send(None)
            return
        except (StopIteration, Cancelled):
            pass
        except Exception as error:  # one task's fault must not end the agent: shown, and the task is over
            report(error)
        self.done = True
        for joiner in self._joiners:
            joiner.wake()


class Timer:
    """A call to come."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function

    @property
    def pending(self) -> bool:
        return self._function is not None

    def cancel(self) -> None:
        """The call will not happen; nothing, when it already has."""
        global _stale
        if self._function is not None:
            self._function = None
            _stale += 1
            if _stale > _COMPACT_ABOVE and _stale * 2 > len(_timers):
                _timers[:] = [entry for entry in _timers if entry[2].pending]
                heapify(_timers)
                _stale = 0

    def _fire(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()


class Event:
    """A flag to wait for."""

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for task in self._waiters:
            task.wake()

    def clear(self) -> None:
        self._set = False

    async def wait(self, timeout: float | None = None) -> bool:
        """Waits until the event is set; False when `timeout` seconds passed before."""
        if self._set:
            return True
        task = current()
        timer = None if timeout is None else call_later(timeout, task.wake)
        self._waiters.append(task)
        try:
            while not self._set and (timer is None or timer.pending):
                await SUSPEND
            return self._set
        finally:
            self._waiters.remove(task)
            if timer is not None:
                timer.cancel()


_ready: deque[Task] = deque()
_watchers: dict[int, Callable[[int], object]] = {}
_timers: list[tuple[float, int, Timer]] = []
_sequence = 0
_stale = 0
_current: Task | None = None
_epoll: select.epoll | None = None


def current() -> Task:
    """The task that is running now."""
    if _current is None:
        raise RuntimeError("no task is running: await needs the guest loop")
    return _current


def spawn(coroutine: Coroutine[Any, Any, Any]) -> Task:
    """Starts a coroutine as a task of its own."""
    return Task(coroutine)


def call_later(seconds: float, function: Callable[[], object]) -> Timer:
    """Calls `function` after `seconds` of monotonic time."""
    global _sequence
    _sequence += 1
    timer = Timer(function)
    heappush(_timers, (now() + seconds, _sequence, timer))
    return timer


async def sleep(seconds: float) -> None:
    """Suspends the current task for `seconds`."""
    timer = call_later(seconds, current().wake)
    try:
        while timer.pending:
            await SUSPEND
    finally:
        timer.cancel()


async def checkpoint() -> None:
    """Lets the other tasks run once."""
    current().wake()
    await SUSPEND


def watch(fd: int, callback: Callable[[int], object]) -> None:
    """Calls `callback(events)` at each edge of readiness of `fd` (a mask of select.EPOLL*)."""
    if _epoll is None:
        raise RuntimeError("watch needs the guest loop")
    _epoll.register(fd, EDGE)
    _watchers[fd] = callback


def unwatch(fd: int) -> None:
    """Ends `watch`; to be called before the descriptor is closed."""
    if _watchers.pop(fd, None) is not None and _epoll is not None:
        _epoll.unregister(fd)


def run(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Runs a coroutine, and whatever it spawns, until that coroutine has ended."""
    global _epoll, _current, _stale
    _epoll = select.epoll()
    try:
        _turn_until(Task(coroutine))
    finally:
        _epoll.close()
        _epoll = _current = None
        _ready.clear()
        _watchers.clear()
        _timers.clear()
        _stale = 0


def _turn_until(last: Task) -> None:
    global _stale
    assert _epoll is not None
    poll = _epoll.poll
    ready, watchers, timers = _ready, _watchers, _timers
    while True:
        for _ in range(len(ready)):
            ready.popleft()._step()
        if last.done:
            return
        while timers and not timers[0][2].pending:
            heappop(timers)
            _stale -= 1
        if ready:
            wait = 0.0
        elif timers:
            wait = max(0.0, timers[0][0] - now())
        else:
            wait = -1.0
        for fd, events in poll(wait):
            callback = watchers.get(fd)
            if callback is not None:
                callback(events)
        if timers:
            moment = now()
            while timers and timers[0][0] <= moment:
                timer = heappop(timers)[2]
                if timer.pending:
                    timer._fire()
                else:
                    _stale -= 1


def report(error: BaseException) -> None:
    """Shows an error that nobody waits for on standard error."""
    import traceback  # costs 5 ms to import, and is hardly ever needed

    traceback.print_exception(error, file=sys.stderr)
