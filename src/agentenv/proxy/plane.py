"""The data plane of a node: who is connected, which relays are under way, who may go where."""

from __future__ import annotations

import asyncio
import heapq
import hmac
from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeVar

from agentenv.config import Settings
from agentenv.errors import AenvError
from agentenv.proxy import answers
from agentenv.proxy.answers import Payload
from agentenv.proxy.directory import Directory, Guard, Route
from agentenv.proxy.head import TRAFFIC_TOKEN, RequestHead
from agentenv.proxy.limits import Limits, TooManyConnections
from agentenv.proxy.order import Passage
from agentenv.proxy.relay import Relay
from agentenv.proxy.routing import AGENT_PORT, Signed, Target, decide, is_internal, signed
from agentenv.proxy.traffic import Traffic
from agentenv.proxy.upstream import Pool

SWEEP_S = 0.5
_ROOM_SHARE = 64

K = TypeVar("K")


class Connection(Protocol):
    """A client's connection, as the sweep sees it."""

    address: bytes

    @property
    def waits_since(self) -> float | None:
        """When it began to wait for a request or the rest of a head; None while there is one under way."""

    def sweep(self, now: float) -> None:
        """End it if it has been idle, or in the midst of a head, for too long."""

    def drop(self) -> None:
        """End it, since others need its place."""


MayForward = Callable[[bytes, str], bool | None]
"""Whether who has an API key may reach the ports of a sandbox; None where the key does not hold."""


class DataPlane:
    """Everything that the fronts of one node share. For one event loop; not thread-safe.

    Args:
        directory: the sandboxes.
        settings: the node's; the domain and the limits are used.
        may_forward: who may have ports forwarded; without it nobody may.
    """

    def __init__(
        self, directory: Directory, settings: Settings, may_forward: MayForward | None = None
    ) -> None:
        self.directory = directory
        self.limits = Limits.of(settings)
        self._may_forward = may_forward
        self.domain = settings.domain
        self.traffic = Traffic()
        self.pool = Pool()
        self._connections: set[Connection] = set()
        self._relays: set[Relay] = set()
        self._by_address: Counter[bytes] = Counter()
        self._by_sandbox: Counter[str] = Counter()  # only where there is a limit
        self._timer: asyncio.TimerHandle | None = None

    def abort(self, sandbox_id: str, generation: int) -> None:
        """A machine is gone: reset every client connection that it was serving, close the idle ones to it.

        To be called at every end of a generation, be it kill, pause or death, in the loop's thread,
        after the directory has stopped to route to that generation.
        """
        for relay in [relay for relay in self._relays if relay.serves(sandbox_id, generation)]:
            relay.generation_ended()
        self.pool.end(sandbox_id, generation)

    def close(self) -> None:
        """Close idle connections to guests and stop sweeping, at the end of the node."""
        self.pool.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def connections_open(self) -> int:
        """How many connections clients have."""
        return len(self._connections)

    @property
    def requests_under_way(self) -> int:
        """How many requests and tunnels to sandboxes there are now."""
        return len(self._relays)

    # For relays.

    def enter(self, relay: Relay) -> None:
        """See `Relays.enter`."""
        self._relays.add(relay)
        self.traffic.requests += 1
        if self.limits.per_sandbox:
            self._by_sandbox[relay.sandbox_id] += 1

    def leave(self, relay: Relay) -> None:
        """See `Relays.leave`."""
        if relay in self._relays:
            self._relays.remove(relay)
            if self.limits.per_sandbox:
                _count_out(self._by_sandbox, relay.sandbox_id)

    def current(self, route: Route) -> bool:
        """See `Relays.current`."""
        now = self.directory.route(route.sandbox_id)
        return now is not None and now.generation == route.generation

    # For fronts.

    def connected(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> AenvError | None:
        """A client has connected; returns why it may not."""
        self._connections.add(connection)
        self.traffic.connections += 1
        self._by_address[connection.address] += 1
        if self._timer is None:
            self._timer = loop.call_later(SWEEP_S, self._sweep, loop)
        most = self.limits.per_client
        if 0 < most < self._by_address[connection.address]:
            return TooManyConnections("this address has as many connections as it may have")
        if len(self._connections) > self.limits.connections and not self._make_room(connection):
            return TooManyConnections("the node has as many connections as it may have", retry_after=5)
        return None

    def _make_room(self, newest: Connection) -> bool:
        """End those that wait longest, some at a time, since finding them takes a look at all."""
        waiting = [
            (since, id(each), each)
            for each in self._connections
            if each is not newest and (since := each.waits_since) is not None
        ]
        for _, _, each in heapq.nsmallest(max(1, self.limits.connections // _ROOM_SHARE), waiting):
            each.drop()
        return bool(waiting)

    def disconnected(self, connection: Connection) -> None:
        """A client's connection is gone, or no longer the front's."""
        if connection in self._connections:
            self._connections.remove(connection)
            _count_out(self._by_address, connection.address)

    def resolve(self, head: RequestHead, last: Passage | None = None) -> Passage | Payload | str | None:
        """Where a request goes: to a sandbox, nowhere (with the answer to give), or to the API (None). An id
        is that of a sandbox that would run if it were woken.

        Args:
            head: the request.
            last: what was the answer to the request before it; the same one again if all of it still holds.

        Raises:
            InvalidRequest: it is for a sandbox, but which cannot be told.
        """
        if (
            last is not None
            and last.head is head
            and not last.fleeting
            and self.directory.route(last.target.sandbox_id) == last.route
        ):
            return last
        where = decide(head, self.domain)
        if where is None:
            return None
        if isinstance(where, Signed):
            signer = self._signer(where)
            if signer is None:
                return answers.bad_signature()
            if isinstance(signer, str):
                return signer
            target = Target(signer.sandbox_id, AGENT_PORT, where.target, True)
            return self._crowded(signer.sandbox_id) or Passage(head, target, signer, True)
        if where.raw and (refused := self._forward_refusal(head, where.sandbox_id)) is not None:
            return refused
        route = self.directory.route(where.sandbox_id)
        if route is None:
            asleep = self.directory.asleep(where.sandbox_id)
            if asleep == "wakes" and (guard := self.directory.guard(where.sandbox_id)) is not None:
                return self._wake_refusal(head, where, guard) or where.sandbox_id
            if asleep == "stalled":
                return answers.stalled(where.sandbox_id)
            if where.raw:
                return answers.not_running(where.sandbox_id, paused=asleep == "paused")
            if asleep == "paused" and not where.e2b:
                return answers.paused(where.sandbox_id)
            return answers.not_found(where.sandbox_id)
        refused = refusal(head, where, route) or self._crowded(where.sandbox_id)
        return refused or Passage(head, where, route, fleeting=self.limits.per_sandbox > 0)

    def _crowded(self, sandbox_id: str) -> Payload | None:
        most = self.limits.per_sandbox
        return answers.crowded(sandbox_id, most) if 0 < most <= self._by_sandbox[sandbox_id] else None

    def _wake_refusal(self, head: RequestHead, target: Target, guard: Guard) -> Payload | None:
        """Why a request may not wake its sandbox; None when it may. The agent, which checks its token and
        signatures for itself, does not run yet; so they are checked here."""
        if target.port == AGENT_PORT and guard.access_token:
            given, wanted = head.value(b"x-access-token"), guard.access_token.encode()
            url = signed(head)
            signs = url is not None and self._signer(url) == target.sandbox_id
            if not signs and not hmac.compare_digest(given, wanted):
                return answers.wake_refused(target.sandbox_id)
        return refusal(head, target, guard)

    def _signer(self, url: Signed) -> Route | str | None:
        return self.directory.by_signature(
            url.path, url.operation, url.username, url.signature, url.expiration
        )

    def _forward_refusal(self, head: RequestHead, sandbox_id: str) -> Payload | None:
        """Why a port is not forwarded; None when it is."""
        may = None if self._may_forward is None else self._may_forward(head.value(b"x-api-key"), sandbox_id)
        if may is None:
            return answers.no_key()
        return None if may else answers.not_running(sandbox_id, paused=False)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        self.pool.sweep(now)
        for connection in list(self._connections):
            connection.sweep(now)
        if self.limits.answer_s or self.limits.still_s:
            for relay in list(self._relays):
                relay.sweep(now, self.limits)
        again = bool(self._connections) or len(self.pool) > 0
        self._timer = loop.call_later(SWEEP_S, self._sweep, loop) if again else None


def _count_out(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def refusal(head: RequestHead, target: Target, guard: Route | Guard) -> Payload | None:
    """Why a request may not go where it wants to; None when it may.

    The agent's own access token is the agent's to check.
    """
    if target.port == AGENT_PORT:
        return answers.internal_path() if is_internal(target.path.partition(b"?")[0]) else None
    if guard.public:
        return None
    given = head.noted.get(TRAFFIC_TOKEN, b"")
    wanted = (guard.traffic_token or "").encode()
    if wanted and hmac.compare_digest(given, wanted):
        return None
    return answers.traffic_refused(target.sandbox_id)
