"""When sandboxes expire: one heap, one timer, any number of expiries at a time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from agentenv.sandbox.parts import Clock

# A timer runs on the monotonic clock and ends are wall times: looking again this often bounds what a
# step of the wall clock, or a sleep of the host, can do.
LOOK_AGAIN_S = 30.0


class Expiry:
    """Calls `act` with each sandbox id once its time has come, all that are due in one go."""

    def __init__(self, clock: Clock, act: Callable[[str], None]) -> None:
        self._clock = clock
        self._act = act
        self._ends: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._cancel: Callable[[], None] | None = None
        self._stopped = False

    def set(self, sandbox_id: str, end_at: float) -> None:
        """Expire `sandbox_id` at `end_at` (seconds since the epoch), instead of when it was said before."""
        if self._stopped:
            return
        self._ends[sandbox_id] = end_at
        heapq.heappush(self._heap, (end_at, sandbox_id))
        if self._heap[0] == (end_at, sandbox_id):
            self._arm()

    def drop(self, sandbox_id: str) -> None:
        """Forget a sandbox."""
        self._ends.pop(sandbox_id, None)

    def stop(self) -> None:
        """Let nothing expire from now on."""
        self._stopped = True
        self._ends.clear()
        self._heap.clear()
        self._disarm()

    def _disarm(self) -> None:
        if self._cancel is not None:
            self._cancel()
            self._cancel = None

    def _arm(self) -> None:
        self._disarm()
        self._discard_stale()
        if self._heap:
            delay = min(max(0.0, self._heap[0][0] - self._clock.now()), LOOK_AGAIN_S)
            self._cancel = self._clock.call_later(delay, self._fire)

    def _discard_stale(self) -> None:
        while self._heap and self._ends.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)

    def _fire(self) -> None:
        self._cancel = None
        now = self._clock.now()
        due: list[str] = []
        self._discard_stale()
        while self._heap and self._heap[0][0] <= now:
            sandbox_id = heapq.heappop(self._heap)[1]
            del self._ends[sandbox_id]
            due.append(sandbox_id)
            self._discard_stale()
        self._arm()
        for sandbox_id in due:
            self._act(sandbox_id)
