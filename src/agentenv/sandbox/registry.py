"""The sandboxes of a node in memory and on record: who is there, whose turn it is, where they are reached."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterator

from agentenv.errors import NotFound, StoreFault
from agentenv.proxy.directory import Asleep, Guard, Route
from agentenv.sandbox.live import KnownRoute, Live
from agentenv.sandbox.records import Claim, Records, Sandbox
from agentenv.sandbox.transitions import (
    ENDS,
    REACHABLE,
    Enter,
    Join,
    Operation,
    Refuse,
    State,
    Stay,
    Wait,
    decide,
)

log = logging.getLogger(__name__)


class Registry:
    """Every sandbox that has not ended is here, from the commit of its first record on.

    Memory follows the record: a change is committed first.
    """

    def __init__(
        self, records: Records, ended: Callable[[str, BaseException | None], None] = lambda name, error: None
    ) -> None:
        self.records = records
        self._ended = ended  # told of each operation that is over
        self._live: dict[str, Live] = {}
        self._owed: dict[str, tuple[Sandbox, bool]] = {}  # what the store refused

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Live]:
        return iter(self._live.values())

    def find(self, sandbox_id: str) -> Live | None:
        """The sandbox of that id, if it has not ended and gone."""
        return self._live.get(sandbox_id)

    def add(self, record: Sandbox, claim: Claim | None = None) -> Live:
        """Record a new sandbox and take it in."""
        self.records.insert(record, claim)
        return self.take(Live(record))

    def take(self, live: Live) -> Live:
        """Take in a sandbox that is on record already."""
        live.ended = self._ended
        self._live[live.record.id] = live
        return live

    def remove(self, live: Live) -> None:
        """Forget a sandbox whose end is on record."""
        self._live.pop(live.record.id, None)

    def clear(self) -> None:
        """Forget all, leaving the records."""
        self._live.clear()

    def commit(self, live: Live, record: Sandbox) -> None:
        """Change a sandbox's record.

        Raises:
            StoreFault: it could not be written; the sandbox is as it was.
        """
        self.records.update(record)
        self._owed.pop(record.id, None)
        live.record = record

    def commit_leaving(self, live: Live, state: State, reason: str) -> None:
        """Record that a sandbox is on its way out. A store that refuses does not keep it: ending things
        is how a full disk gets room. What was not written is made up for by `write_owed`."""
        self.commit_anyway(live, live.record.with_state(state, reason=reason))

    def commit_end(self, live: Live, state: State, reason: str, at: float) -> None:
        """Record an end, as `commit_leaving`. One that was never answered gives its idempotency key free."""
        unanswered = live.record.state is State.CREATING
        ended = live.record.with_state(state, ended_at=at, reason=reason)
        self.commit_anyway(live, ended, forget_claim=unanswered)

    def commit_anyway(self, live: Live, record: Sandbox, *, forget_claim: bool = False) -> None:
        """Change a sandbox's record although the store may refuse it."""
        live.record = record
        forget_claim = forget_claim or self._owed.pop(record.id, (record, False))[1]
        try:
            self.records.update(record, forget_claim=forget_claim)
        except StoreFault as error:
            log.error("sandbox %s is %s, which is not recorded: %s", record.id, record.state, error)
            self._owed[record.id] = (record, forget_claim)

    @property
    def owes(self) -> bool:
        """Whether there are records that are not as they should be."""
        return bool(self._owed)

    def write_owed(self) -> None:
        """Write the records that the store refused before.

        Raises:
            StoreFault: it does so again.
        """
        for sandbox_id, (record, forget_claim) in list(self._owed.items()):
            self.records.update(record, forget_claim=forget_claim)
            del self._owed[sandbox_id]

    async def turn(
        self, sandbox_id: str, operation: Operation, limit_s: float
    ) -> tuple[Live, Enter | Stay | Join]:
        """Wait until `operation` may be carried out. The caller acts before it awaits anything.

        Raises:
            NotFound: there is no such sandbox, or it is ending. Conflict: its state forbids the
                operation, or another one is still under way after `limit_s` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while True:
            live = self._live.get(sandbox_id)
            if live is None or live.record.state in ENDS:
                raise self.missing(sandbox_id)
            verdict = decide(operation, live.record.state)
            if isinstance(verdict, Refuse):
                raise verdict.error(f'Sandbox "{sandbox_id}" {verdict.reason}')
            if operation is not Operation.REFRESH:
                live.active_at = time.monotonic()
            if not isinstance(verdict, Wait) and not (isinstance(verdict, Enter) and live.busy):
                return live, verdict
            await live.settled(deadline - loop.time())

    def project_of(self, sandbox_id: str) -> str | None:
        """Whose a sandbox is, or was; None where that is not known."""
        live = self._live.get(sandbox_id)
        record = live.record if live is not None else self.records.find(sandbox_id)
        return None if record is None else record.project

    def missing(self, sandbox_id: str) -> NotFound:
        """The error for a sandbox that is not there, with how it ended where that is known."""
        message = f"Sandbox \"{sandbox_id}\" doesn't exist or you don't have access to it"
        live = self._live.get(sandbox_id)
        record = live.record if live is not None else self.records.find(sandbox_id)
        if record is not None and record.reason:
            message = f"{message}: {'it failed: ' if record.state is State.FAILED else ''}{record.reason}"
        return NotFound(message)

    def route(self, sandbox_id: str) -> Route | None:
        """See proxy.directory.Directory. Whoever asks is about to use it."""
        live = self._live.get(sandbox_id)
        if live is None:
            return None
        live.active_at = time.monotonic()
        return route_of(live)

    def asleep(self, sandbox_id: str) -> Asleep | None:
        """See proxy.directory.Directory."""
        live = self._live.get(sandbox_id)
        if live is None:
            return None
        state = live.record.state
        if state is State.RESUMING:
            return "wakes"
        if state in (State.PAUSING, State.PAUSED):
            return "wakes" if live.record.lifecycle.auto_resume else "paused"
        if state in REACHABLE and live.stalled is not None:
            return "stalled"
        return None

    def guard(self, sandbox_id: str) -> Guard | None:
        """See proxy.directory.Directory."""
        live = self._live.get(sandbox_id)
        if live is None:
            return None
        record = live.record
        wakes_anyway = record.state is State.RESUMING
        token = None if wakes_anyway else record.access_token
        return Guard(token or "", record.traffic_token, record.network.public)

    def by_signature(
        self, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route | str | None:
        """See proxy.directory.Directory."""
        given = signature.encode(errors="replace")
        for live in self:
            token, route = live.record.access_token, route_of(live)
            if token is None or (route is None and self.asleep(live.record.id) != "wakes"):
                continue
            expected = file_signature(path, operation, username, token, expiration)
            if hmac.compare_digest(expected.encode(), given):
                return route or (None if has_expired(expiration) else live.record.id)
        return None


def route_of(live: Live) -> Route | None:
    """Where a sandbox is reached now, if it is. It is asked for with each request, and seldom changes."""
    known = live.known_route
    if (
        known is None
        or known.record is not live.record
        or known.slot is not live.slot
        or known.stalled != live.stalled
    ):
        known = live.known_route = KnownRoute(live.record, live.slot, live.stalled, _route_of(live))
    return known.route


def _route_of(live: Live) -> Route | None:
    record = live.record
    if record.state not in REACHABLE or live.slot is None or live.stalled is not None:
        return None
    return Route(
        sandbox_id=record.id,
        generation=record.generation,
        address=live.slot.address,
        access_token=record.access_token or "",
        traffic_token=record.traffic_token,
        public=record.network.public,
        mask_host=record.network.mask_host,
    )


def has_expired(expiration: str | None) -> bool:
    """Whether a file URL that was good until then, in seconds since the epoch, is no longer."""
    return expiration is not None and not (expiration.isdecimal() and int(expiration) >= time.time())


def file_signature(path: str, operation: str, username: str, token: str, expiration: str | None) -> str:
    """E2B's v1 signature of a file url: `v1_` and the unpadded base64 of a SHA-256."""
    parts = [path, operation, username, token, *([expiration] if expiration is not None else [])]
    digest = hashlib.sha256(":".join(parts).encode(errors="surrogateescape")).digest()
    return "v1_" + base64.b64encode(digest).decode().rstrip("=")
