"""The API's own protocol behind the front: uvicorn's, on a transport that the front lends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from agentenv.proxy.exchange import Client


class Lender(Protocol):
    """The owner of a lent transport."""

    def api_paused(self, paused: bool) -> None:
        """The API wants no more bytes for now, or wants them again."""

    def api_took_over(self, protocol: asyncio.BaseProtocol) -> None:
        """The connection is no longer HTTP and belongs to `protocol` from now on."""


class LentTransport(asyncio.Transport):
    """A client's transport as the API sees it. Reading stays with the front until it is taken over."""

    def __init__(self, transport: asyncio.Transport, lender: Lender, answering: Callable[[], bool]) -> None:
        super().__init__()
        self._answering = answering
        self._transport = transport
        self._lender: Lender | None = lender

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        if self._lender is not None:
            self._lender.api_took_over(protocol)
            self._lender = None
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()

    def pause_reading(self) -> None:
        if self._lender is not None:
            self._lender.api_paused(True)
        else:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._lender is not None:
            self._lender.api_paused(False)
        else:
            self._transport.resume_reading()

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        """In the midst of an answer that is broken off, the client must not take what it has for all of it;
        nor is it waited for until it has read that."""
        if self._answering():
            self._transport.abort()
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._transport.write(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        self._transport.writelines(list_of_data)

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        self._transport.write_eof()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()


class ApiProtocol(HttpToolsProtocol):
    """uvicorn's protocol, fed one request at a time. The front is what counts as the connection, and
    what ends it when it is idle."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        answered: Callable[[], None],
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self._answered = answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.connections.discard(self)

    def answering(self) -> bool:
        """Whether an answer has begun and is not complete."""
        cycle = self.cycle
        return cycle is not None and cycle.response_started and not cycle.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()
        self._answered()


class ApiExchange:
    """The requests of one connection that are the API's, one after the other."""

    def __init__(
        self,
        client: Client,
        lender: Lender,
        transport: asyncio.Transport,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._client = client
        self._request_done = self._answer_done = False
        self._protocol = ApiProtocol(config, server_state, app_state, loop, self._answered)
        self._protocol.connection_made(LentTransport(transport, lender, self._protocol.answering))

    def begin(self, head: bytes) -> None:
        """A request begins, with its whole head."""
        self._request_done = self._answer_done = False
        self.client_full(self._client.full)
        self._protocol.data_received(head)

    def request_data(self, data: bytes, last: bool) -> None:
        """See `Exchange.request_data`."""
        if data:
            self._protocol.data_received(data)
        self._request_done = self._request_done or last
        self._end_if_done()

    def request_eof(self) -> bool:
        """See `Exchange.request_eof`."""
        return False

    def client_lost(self, error: Exception | None) -> None:
        """See `Exchange.client_lost`; it is told between exchanges too."""
        self._protocol.connection_lost(error)

    def abandon(self) -> bool:
        """See `Exchange.abandon`."""
        cycle = self._protocol.cycle
        self._protocol.connection_lost(ConnectionAbortedError("the request is malformed"))
        return cycle is None or not cycle.response_started

    def client_full(self, full: bool) -> None:
        """See `Exchange.client_full`."""
        if full:
            self._protocol.pause_writing()
        else:
            self._protocol.resume_writing()

    def shutdown(self) -> None:
        """The server ends: the answer under way is the connection's last."""
        self._protocol.shutdown()

    def _answered(self) -> None:
        self._answer_done = True
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._request_done and self._answer_done:
            self._answer_done = False
            self._client.finish(True)
