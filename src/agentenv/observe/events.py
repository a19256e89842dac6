"""Events of a node: a bounded history, and those who follow it.

Each has a number, and an id that is the node's life and the number: whoever comes again with the id of the
last event that it saw gets those after it, or is told that some are lost. Nobody is waited for: a follower
with too many events before it is cut off.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agentenv.errors import CapacityExceeded
from agentenv.identity.records import DEFAULT
from agentenv.sandbox.observing import Happening, Observer
from agentenv.sandbox.requests import Stopping
from agentenv.template.records import Build
from agentenv.template.states import BuildState

KEEP_EVENTS = 4096
PENDING_MOST = 512
FOLLOWERS_MOST = 64

SANDBOX, BUILD = "sandbox", "build"
LOST = "lost"
BUILD_KINDS = {
    BuildState.BUILDING: "build_started",
    BuildState.READY: "build_ready",
    BuildState.ERROR: "build_failed",
    BuildState.CANCELLED: "build_cancelled",
}


@dataclass(frozen=True)
class Event:
    """Something that happened; `at` is seconds since the epoch. `build_id` is the build that a sandbox is of,
    or that the event is about."""

    id: str
    number: int
    at: float
    about: str
    kind: str
    template_id: str
    build_id: str
    sandbox_id: str = ""
    project: str = DEFAULT
    state: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    detail: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Filter:
    """Which events are wanted; what is empty does not matter."""

    sandboxes: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    project: str | None = None

    def passes(self, event: Event) -> bool:
        """Whether an event is wanted."""
        return (
            self.project in (None, event.project)
            and (not self.sandboxes or event.sandbox_id in self.sandboxes)
            and (not self.kinds or event.kind in self.kinds)
        )


class Follower:
    """One who reads events as they come. `lost` says that events between the last it saw and the first it
    gets are not known any more; `cut`, that it was too slow."""

    def __init__(self, wanted: Filter, known: Sequence[Event] = (), *, lost: bool = False) -> None:
        self.lost = lost
        self.cut = False
        self.closed = asyncio.Event()
        self._wanted = wanted
        self._most = len(known) + PENDING_MOST
        self._pending: deque[Event] = deque()
        self._there = asyncio.Event()
        for event in known:
            self.give(event)

    def give(self, event: Event) -> None:
        """Have an event read, if it is wanted and there is room."""
        if self.closed.is_set() or not self._wanted.passes(event):
            return
        if len(self._pending) >= self._most:
            self.cut = True
            self.close()
            return
        self._pending.append(event)
        self._there.set()

    def close(self) -> None:
        """Let reading end."""
        self.closed.set()
        self._pending.clear()
        self._there.set()

    async def read(self) -> list[Event]:
        """Those that have come, at least one; none when there will be no more."""
        await self._there.wait()
        found = list(self._pending)
        self._pending.clear()
        if not self.closed.is_set():
            self._there.clear()
        return found


class Events(Observer):
    """The history of a node, and its followers.

    Args:
        keep: how many events are known.
        followers: how many may follow at a time.
    """

    def __init__(self, keep: int = KEEP_EVENTS, followers: int = FOLLOWERS_MOST) -> None:
        self.life = secrets.token_hex(4)
        self._history: deque[Event] = deque(maxlen=keep)
        self._count = 0
        self._followers: set[Follower] = set()
        self._most = followers
        self._over = False
        # Whose a build is, by its template's id.
        self.project_of: Callable[[str], str] = lambda template_id: DEFAULT

    def happened(self, happening: Happening) -> None:
        sandbox = happening.sandbox
        self._add(
            Event(
                *self._next(),
                at=happening.at,
                about=SANDBOX,
                kind=str(happening.change),
                template_id=sandbox.template.id,
                build_id=sandbox.template.build_id,
                sandbox_id=sandbox.id,
                project=sandbox.project,
                state=str(sandbox.state),
                metadata=sandbox.metadata,
                detail=happening.detail,
            )
        )

    def built(self, build: Build) -> None:
        """A build has come to another state."""
        if (kind := BUILD_KINDS.get(build.state)) is not None:
            reason = {} if build.reason is None else {"reason": build.reason.message}
            self._add(
                Event(
                    *self._next(),
                    at=build.updated_at,
                    about=BUILD,
                    kind=kind,
                    template_id=build.template_id,
                    build_id=build.id,
                    project=self.project_of(build.template_id),
                    state=str(build.state),
                    detail=reason,
                )
            )

    def newest_first(self) -> Iterator[Event]:
        """All that are known."""
        return reversed(self._history)

    def follow(self, wanted: Filter, after: str | None = None) -> Follower:
        """Read events from now on, or those after the one with the id `after` first.

        Raises:
            CapacityExceeded: as many follow already as may. Stopping: there will be no more events.
        """
        if self._over:
            raise Stopping("the node is stopping", retry_after=10)
        if len(self._followers) >= self._most:
            raise CapacityExceeded(f"{self._most} clients follow the events already", retry_after=5)
        since = self._count if not after else self._number(after)
        oldest = self._history[0].number if self._history else self._count
        known = [event for event in self._history if after and event.number >= (since or 0)]
        follower = Follower(wanted, known, lost=since is None or since < oldest)
        self._followers.add(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        """Who followed does so no more."""
        follower.close()
        self._followers.discard(follower)

    @property
    def following(self) -> int:
        """How many follow now."""
        return len(self._followers)

    def close(self) -> None:
        """Let all who follow come to an end, and nobody follow any more."""
        self._over = True
        for follower in list(self._followers):
            self.leave(follower)

    def _number(self, event_id: str) -> int | None:
        """The number of the event after that one; None when it is not of this life."""
        life, _, number = event_id.partition("-")
        if life != self.life or not number.isdecimal() or len(number) > 18 or int(number) >= self._count:
            return None
        return int(number) + 1

    def _next(self) -> tuple[str, int]:
        """The id and the number of the next event."""
        return f"{self.life}-{self._count}", self._count

    def _add(self, event: Event) -> None:
        self._count += 1
        self._history.append(event)
        for follower in self._followers:
            follower.give(event)
