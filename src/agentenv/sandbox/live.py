"""One sandbox in memory: its record, its machine, and the operation under way on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

from agentenv.errors import Conflict
from agentenv.network.slot import Slot
from agentenv.proxy.directory import Route
from agentenv.sandbox.records import Sandbox
from agentenv.snapshot.holds import Hold
from agentenv.vmm.machine import Machine

log = logging.getLogger(__name__)

T = TypeVar("T")


class KnownRoute(NamedTuple):
    """Where a sandbox is reached as long as these are what they were. They are not changed but replaced."""

    record: Sandbox
    slot: Slot | None
    stalled: str | None
    route: Route | None


class Live:
    """A sandbox that has not ended. The service alone changes it."""

    def __init__(self, record: Sandbox, machine: Machine | None = None, slot: Slot | None = None) -> None:
        self.record = record
        self.machine = machine
        self.slot = slot
        self.holds: dict[str, Hold] = {}
        self.stalled: str | None = None  # why its hypervisor stopped it, until it goes on
        self.known_route: KnownRoute | None = None
        self.active_at = 0.0  # when it was last asked for something, by the monotonic clock
        self.failed_pauses = 0  # in a row
        self.rules = asyncio.Lock()  # held while its network rules are changed
        self.operation: asyncio.Task[Any] | None = None
        self.watch: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        return self.operation is not None and not self.operation.done()

    def begin(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start the operation `work`; it runs to its end whoever waits for it."""
        assert not self.busy, f"{self.record.id}: {name} while {self.operation} is under way"
        task = asyncio.create_task(work, name=f"{name} {self.record.id}")
        self.operation = task
        task.add_done_callback(self._finished)
        return task

    def follow(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Have `work` follow as the next operation, before anybody else gets a turn: called by the
        operation under way as the last it does."""
        assert asyncio.current_task() is self.operation
        self.operation = None
        return self.begin(work, name)

    def keep(self, role: str, hold: Hold | None) -> None:
        """Hold a snapshot's files as `role`, in the place of the one before."""
        before = self.holds.pop(role, None)
        if hold is not None:
            self.holds[role] = hold
        if before is not None:
            before.release()

    def let_go(self) -> None:
        """Release all holds."""
        for role in list(self.holds):
            self.keep(role, None)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        if self.operation is task:
            self.operation = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s: %s", task.get_name(), error)  # also retrieves it: its caller may be gone

    async def settled(self, limit_s: float) -> None:
        """Return once no operation is under way.

        Raises:
            Conflict: one still is after `limit_s` seconds.
        """
        if self.operation is None:
            return
        done, _ = await asyncio.wait({self.operation}, timeout=max(0.0, limit_s))
        if not done:
            raise Conflict(
                f'Sandbox "{self.record.id}" is still {self.record.state}',
                remedy="try again later",
                retry_after=5,
            )
