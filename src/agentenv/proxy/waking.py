"""A request to a sandbox that is paused and wakes for traffic: kept until the sandbox runs."""

from __future__ import annotations

import asyncio
from typing import Protocol

from agentenv.proxy.directory import Directory
from agentenv.proxy.head import RequestHead


class Sleeper(Protocol):
    """The client's connection, as far as a waiting request needs it."""

    def hold_body(self, hold: bool) -> None:
        """See `Client.hold_body`."""

    def woken(self, waiting: Waking) -> None:
        """The wait is over."""


class Waking:
    """Keeps a request, of its body no more than came with the head, while its sandbox is woken.

    Args:
        client: who is told of the end.
        directory: where the sandbox is.
        sandbox_id: its id.
        head: the request.
        has_body: whether a body follows.
        limit_s: how long the request waits; 0 for as long as it takes.
    """

    def __init__(
        self,
        client: Sleeper,
        directory: Directory,
        sandbox_id: str,
        head: RequestHead,
        has_body: bool,
        limit_s: float = 0,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.head = head
        self.has_body = has_body
        self.kept: list[tuple[bytes, bool]] = []
        self.late = False  # the wait ended before the sandbox was awake
        self._limit_s = limit_s
        self._client = client
        self._directory = directory
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Read no more of the client, and wake the sandbox."""
        self._client.hold_body(True)
        self._task = asyncio.ensure_future(self._wake())

    async def _wake(self) -> None:
        waking = asyncio.ensure_future(self._directory.wake(self.sandbox_id))
        await asyncio.wait({waking}, timeout=self._limit_s or None)  # which goes on without the request
        self.late = not waking.done()
        if not self.late:
            await waking
        self._client.woken(self)

    def request_data(self, data: bytes, last: bool) -> None:
        """See `Exchange.request_data`."""
        self.kept.append((data, last))

    def request_eof(self) -> bool:
        """See `Exchange.request_eof`. With reading held it is not heard of."""
        return False

    def client_lost(self, error: Exception | None) -> None:
        """See `Exchange.client_lost`. The sandbox wakes all the same."""

    def abandon(self) -> bool:
        """See `Exchange.abandon`."""
        return True

    def client_full(self, full: bool) -> None:
        """See `Exchange.client_full`."""
