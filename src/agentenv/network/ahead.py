"""Network slots made ahead, so that a machine waits for none: making one takes the kernel milliseconds.

Whoever asks gets a spare one, by name on record, or one that is made now. How many are kept is decided
elsewhere; here they are made, handed out and taken back when told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from agentenv.limits import NetworkLimits
from agentenv.network.policy import UNRESTRICTED, Policy
from agentenv.network.slot import Slot

OWNER = "ahead"
REMEMBERED = 1024


class SlotSource(Protocol):
    """Where slots come from; see network.slots.Slots."""

    @property
    def free(self) -> int: ...
    @property
    def ipv6(self) -> bool: ...
    async def acquire(self, owner: str) -> Slot: ...
    async def limit(self, slot: Slot, limits: NetworkLimits) -> None: ...
    async def release(self, slot: Slot) -> None: ...
    def hand_over(self, slot: Slot, owner: str) -> None: ...
    def check(self, policy: Policy) -> None: ...
    async def apply(self, slot: Slot, policy: Policy) -> None: ...
    async def adopt(self, owner: str, policy: Policy = ...) -> Slot | None: ...
    async def reap(self, keep: set[str]) -> list[str]: ...


class SlotsAhead:
    """A node's slots with some made ahead. Spares of an earlier life are reaped like any leftover.

    Args:
        source: makes and removes them.
        now: the clock by which demand is remembered, in seconds.
    """

    def __init__(self, source: SlotSource, now: Callable[[], float]) -> None:
        self._source = source
        self._now = now
        self._spare: deque[Slot] = deque()
        self.making = 0
        self.asked: deque[float] = deque(maxlen=REMEMBERED)
        self.on_asked: Callable[[], None] = lambda: None

    @property
    def spare(self) -> int:
        """How many are ready."""
        return len(self._spare)

    @property
    def free(self) -> int:
        """How many more can be made."""
        return self._source.free

    @property
    def ipv6(self) -> bool:
        """Whether guests have IPv6."""
        return self._source.ipv6

    async def acquire(self, owner: str) -> Slot:
        """A slot that is recorded as the owner's; see Slots.acquire."""
        self.asked.append(self._now())
        try:
            if self._spare:
                slot = self._spare.popleft()
                self._source.hand_over(slot, owner)
                return slot
        finally:
            self.on_asked()
        return await self._source.acquire(owner)

    async def acquire_new(self, owner: str) -> Slot:
        """The same for one who can wait: spare slots are left to others, and it does not count as demand."""
        return await self._source.acquire(owner)

    async def limit(self, slot: Slot, limits: NetworkLimits) -> None:
        """See Slots.limit."""
        await self._source.limit(slot, limits)

    def hand_over(self, slot: Slot, owner: str) -> None:
        """See Slots.hand_over."""
        self._source.hand_over(slot, owner)

    async def release(self, slot: Slot) -> None:
        """See Slots.release."""
        await self._source.release(slot)

    def check(self, policy: Policy) -> None:
        """See Slots.check."""
        self._source.check(policy)

    async def apply(self, slot: Slot, policy: Policy) -> None:
        """See Slots.apply."""
        await self._source.apply(slot, policy)

    async def adopt(self, owner: str, policy: Policy = UNRESTRICTED) -> Slot | None:
        """See Slots.adopt."""
        return await self._source.adopt(owner, policy)

    async def reap(self, keep: set[str]) -> list[str]:
        """See Slots.reap. What was made ahead in this life stays."""
        return await self._source.reap({*keep, OWNER} if self._spare or self.making else keep)

    async def make(self) -> None:
        """Make one more spare slot.

        Raises:
            CapacityExceeded, HostFault: it cannot be made.
        """
        self.making += 1
        try:
            self._spare.append(await self._source.acquire(OWNER))
        finally:
            self.making -= 1

    async def drop(self) -> None:
        """Remove one spare slot, if there is one.

        Raises:
            HostFault: it could not be removed; its record stays.
        """
        if self._spare:
            await self._source.release(self._spare.pop())
