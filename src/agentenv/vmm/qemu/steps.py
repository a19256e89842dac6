"""The phases of a launch or a capture: traced, timed, and with typed errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from agentenv.vmm.qemu import faults

Trace = Callable[[str, Literal["started", "complete", "failed"]], None]
"""Told of each step of a launch or capture; raising in it makes the step fail."""


@dataclass
class Steps:
    """The phases of one launch or capture: traced, timed (seconds by name), system errors translated."""

    trace: Trace | None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, doing: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            self._tell(name, "started")
            yield
        except OSError as error:
            self._tell(name, "failed")
            raise faults.of_system(error, doing) from error
        except BaseException:
            self._tell(name, "failed")
            raise
        self.seconds[name] = time.perf_counter() - started
        self._tell(name, "complete")

    def _tell(self, name: str, state: Literal["started", "complete", "failed"]) -> None:
        if self.trace:
            self.trace(name, state)
