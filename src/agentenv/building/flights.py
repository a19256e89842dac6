"""One making for all who want the same at the same time. It goes on while one of them waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from agentenv.building.logs import Feed
from agentenv.snapshot.records import Snapshot

Listener = Callable[[Any], None]


@dataclass
class _Flight:
    task: asyncio.Task[Snapshot]
    feed: Feed
    waiting: int = 0


class Flights:
    """What is being made, by key."""

    def __init__(self) -> None:
        self._under_way: dict[str, _Flight] = {}

    async def join(
        self, key: str, work: Callable[[Feed], Coroutine[Any, Any, Snapshot]], listener: Listener
    ) -> Snapshot:
        """What `work` makes, or somebody else's work for the same key that is under way. `listener` is told
        what is told, from its beginning. When the last who waits is cancelled, so is the work.

        Raises:
            whatever the work raises.
        """
        flight = self._under_way.get(key)
        if flight is None:
            feed = Feed()
            flight = _Flight(asyncio.create_task(work(feed), name=f"make {key[:12]}"), feed)
            self._under_way[key] = flight
            flight.task.add_done_callback(lambda done: self._ended(key, done))
        flight.feed.listen(listener)
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            flight.feed.ignore(listener)
            if not flight.waiting and not flight.task.done():
                flight.task.cancel()
                if self._under_way.get(key) is flight:
                    del self._under_way[key]
                await asyncio.gather(flight.task, return_exceptions=True)

    def _ended(self, key: str, task: asyncio.Task[Snapshot]) -> None:
        flight = self._under_way.get(key)
        if flight is not None and flight.task is task:
            del self._under_way[key]
        if not task.cancelled():
            task.exception()  # each who waits has it
