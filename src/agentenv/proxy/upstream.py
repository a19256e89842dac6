"""Connections to guests: used, kept for the next request, never shared between generations."""

from __future__ import annotations

import asyncio
import re
import select
import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

from agentenv.proxy.head import AnswerHead, Memory
from agentenv.proxy.routing import AGENT_PORT

AGENT_IDLE_S = 60.0  # the agent keeps idle connections for longer than this
GUEST_IDLE_S = 1.5  # servers of all kinds: the most impatient common ones close after 2 s
# As many as are in use at once: what many clients got answered in one turn of the loop is idle until the
# next.
IDLE_PER_PORT = 256
IDLE_IN_ALL = 1024
WRITE_HIGH_WATER = 512 * 1024  # bytes that wait for a slow reader before the sender is stopped

_KEEP_ALIVE_TIMEOUT = re.compile(rb"(?:^|[ ,])timeout=([0-9]{1,6})", re.IGNORECASE)


class Key(NamedTuple):
    """What a connection is for."""

    sandbox_id: str
    generation: int
    port: int


class User(Protocol):
    """Who uses a connection now."""

    def answer_data(self, data: bytes) -> None:
        """Bytes from the guest."""

    def answer_eof(self) -> bool:
        """The guest sends no more; true keeps the way to it open."""

    def upstream_lost(self, error: Exception | None) -> None:
        """The connection is gone."""

    def upstream_full(self, full: bool) -> None:
        """The guest reads slower than is written to it, or has caught up."""


class Upstream(asyncio.Protocol):
    """One connection to a guest. With a user it passes events on; idle, any event ends it."""

    transport: asyncio.Transport

    def __init__(self, key: Key) -> None:
        self.key = key
        self.user: User | None = None
        self.memory: Memory[AnswerHead] = Memory()
        self.idle_until = 0.0
        self._poll = select.poll()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll.register(sock.fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if self.user is not None:
            self.user.answer_data(data)
        else:
            self.transport.abort()  # an answer that nobody asked for must not meet the next request

    def eof_received(self) -> bool:
        return self.user.answer_eof() if self.user is not None else False

    def connection_lost(self, exc: Exception | None) -> None:
        if self.user is not None:
            self.user.upstream_lost(exc)

    def pause_writing(self) -> None:
        if self.user is not None:
            self.user.upstream_full(True)

    def resume_writing(self) -> None:
        if self.user is not None:
            self.user.upstream_full(False)

    def usable(self) -> bool:
        """Whether the guest has neither closed nor said anything, even what the loop has not seen yet."""
        return not self.transport.is_closing() and not self._poll.poll(0)

    def quiet(self) -> bool:
        """Whether nothing is on its way to the guest any more."""
        return not self.transport.is_closing() and self.transport.get_write_buffer_size() == 0


class Pool:
    """Idle connections. All of it is synchronous: taking and giving back cannot be interleaved."""

    def __init__(self) -> None:
        self._idle: dict[Key, list[Upstream]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def take(self, key: Key, now: float) -> Upstream | None:
        """The most recently used idle connection for exactly this key, if one is fit."""
        idle = self._idle.get(key)
        while idle:
            upstream = idle.pop()
            self._count -= 1
            if upstream.idle_until > now and upstream.usable():
                return upstream
            upstream.transport.abort()
        return None

    def give(self, upstream: Upstream, now: float, idle_s: float) -> None:
        """Keep a connection whose exchange is over; it is closed when there are enough."""
        idle = self._idle.setdefault(upstream.key, [])
        if len(idle) >= IDLE_PER_PORT or self._count >= IDLE_IN_ALL or idle_s <= 0:
            upstream.transport.abort()
            return
        upstream.idle_until = now + idle_s
        idle.append(upstream)
        self._count += 1

    def sweep(self, now: float) -> None:
        """Close what has been idle for too long or was closed by the guest."""
        self._drop(lambda upstream: upstream.idle_until <= now or upstream.transport.is_closing())

    def end(self, sandbox_id: str, generation: int) -> None:
        """Close everything of a generation."""
        self._drop(lambda upstream: upstream.key[:2] == (sandbox_id, generation))

    def close(self) -> None:
        """Close everything."""
        self._drop(lambda _: True)

    def _drop(self, condition: Callable[[Upstream], bool]) -> None:
        for key, idle in list(self._idle.items()):
            kept = []
            for upstream in idle:
                if condition(upstream):
                    upstream.transport.abort()
                else:
                    kept.append(upstream)
            self._count -= len(idle) - len(kept)
            if kept:
                self._idle[key] = kept
            else:
                del self._idle[key]


def idle_time(port: int, hint: bytes | None) -> float:
    """Seconds for which a connection may lie idle.

    Args:
        port: the agent's connections live longer.
        hint: the guest's `Keep-Alive` field; it is closed a second before the guest would.
    """
    longest = AGENT_IDLE_S if port == AGENT_PORT else GUEST_IDLE_S
    match = _KEEP_ALIVE_TIMEOUT.search(hint) if hint else None
    return min(longest, int(match[1]) - 1.0) if match else longest
