"""The phases of an operation: one context manager that logging and timing share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Phase:
    """A phase that has ended; `duration_s` in seconds, `begun_s` since the operation began."""

    name: str
    duration_s: float
    failed: bool
    begun_s: float = 0.0


class Phases:
    """What one operation on one sandbox spent its time on."""

    def __init__(
        self, operation: str, sandbox_id: str, *, counter: Callable[[], float] = time.perf_counter
    ) -> None:
        self.operation = operation
        self.sandbox_id = sandbox_id
        self.ended: list[Phase] = []
        self._counter = counter
        self._begun = counter()
        self._total: float | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time and log what happens inside as the phase `name` (letters, digits and dashes)."""
        begun = self._counter()
        log.debug("%s %s: %s started", self.operation, self.sandbox_id, name)
        try:
            yield
        except BaseException as error:
            self._end(name, begun, failed=True)
            log.debug("%s %s: %s failed: %r", self.operation, self.sandbox_id, name, error)
            raise
        self._end(name, begun, failed=False)
        log.debug(
            "%s %s: %s took %.1f ms", self.operation, self.sandbox_id, name, self.ended[-1].duration_s * 1e3
        )

    def _end(self, name: str, begun: float, *, failed: bool) -> None:
        self.ended.append(Phase(name, self._counter() - begun, failed, begun - self._begun))

    def finish(self) -> None:
        """Note that the operation is over: the total stops here."""
        self._total = self._counter() - self._begun

    @property
    def total_s(self) -> float:
        """Seconds since the operation began, or that it took."""
        return self._counter() - self._begun if self._total is None else self._total

    def header(self) -> str:
        """The value of a Server-Timing header (W3C Server Timing; durations in milliseconds)."""
        parts = [f"{phase.name};dur={phase.duration_s * 1e3:.1f}" for phase in self.ended]
        return ", ".join([*parts, f"total;dur={self.total_s * 1e3:.1f}"])

    def __str__(self) -> str:
        parts = [f"{phase.name} {phase.duration_s * 1e3:.0f}" for phase in self.ended]
        return f"{self.total_s * 1e3:.0f} ms ({', '.join(parts)})"
