"""What listens on the node's port: reads the head of each request and lets its exchange answer it.

One connection may carry requests for the API and for several sandboxes, one after the other. The
front follows the framing of requests; exchanges follow that of answers.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, ClassVar, cast

from uvicorn.config import Config
from uvicorn.protocols.utils import get_remote_addr, is_ssl
from uvicorn.server import ServerState

from agentenv.config import Settings
from agentenv.errors import AenvError, InvalidRequest
from agentenv.proxy import answers
from agentenv.proxy.answers import Payload
from agentenv.proxy.api import ApiExchange
from agentenv.proxy.directory import Directory
from agentenv.proxy.exchange import Exchange
from agentenv.proxy.forward import request_to_api
from agentenv.proxy.forwarded import Forwarded
from agentenv.proxy.framing import Body, Malformed, Sized, UntilClose
from agentenv.proxy.head import (
    END,
    HeadTooLarge,
    Memory,
    NeverComplete,
    RequestHead,
    never_a_head,
    parse_request,
    request_body,
)
from agentenv.proxy.order import Order, Passage
from agentenv.proxy.plane import DataPlane, MayForward
from agentenv.proxy.relay import Relay
from agentenv.proxy.upstream import WRITE_HIGH_WATER
from agentenv.proxy.waking import Waking

SHUTDOWN_S = 3.0  # that relays under way have when the server ends; then they are reset
LINGER_S = 2.0  # that a client has to read an answer which ends its connection while it still sends
LINGER_LIMIT = 16 * 1024 * 1024  # bytes that it may send meanwhile
DISCARD_LIMIT = 1024 * 1024  # bytes of an unwanted body that are read to keep the connection

TLS_HANDSHAKE = b"\x16"  # the first byte of a client that speaks TLS (RFC 8446, 5.1)

_BODY, _NEXT, _API = 1, 2, 4  # why reading from the client is paused
_NO_TLS = "TLS is not spoken on this port: use http://, or the port of AENV_TLS_PORT"
_LOOPBACK = (b"127.0.0.1", b"::1")


class Discard:
    """Takes the rest of a request that was answered already."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._left = DISCARD_LIMIT

    def request_data(self, data: bytes, last: bool) -> None:
        """See `Exchange.request_data`."""
        self._left -= len(data)
        if last:
            self._front.finish(True)
        elif self._left < 0:
            self._front.give_up_body()

    def request_eof(self) -> bool:
        """See `Exchange.request_eof`."""
        return False

    def client_lost(self, error: Exception | None) -> None:
        """See `Exchange.client_lost`."""

    def abandon(self) -> bool:
        """See `Exchange.abandon`."""
        return False

    def client_full(self, full: bool) -> None:
        """See `Exchange.client_full`."""


class Front(asyncio.Protocol):
    """One client's connection. A class for `uvicorn.Config(http=...)` once bound to a data plane."""

    plane: ClassVar[DataPlane]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.address = b""
        self.stopping = False
        self.full = False
        self._config, self._server_state, self._app_state = config, server_state, app_state
        self._loop = _loop or asyncio.get_event_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._secure = False
        self._memory: Memory[RequestHead] = Memory()
        self._order: Order | None = None  # that the last request to a sandbox came to
        self._head = bytearray()  # the next request, as far as its head is not complete
        self._waiting = bytearray()  # what was sent before the exchange under way is over
        self._body: Body | None = None  # of the request under way, until it has all come
        self._exchange: Exchange | None = None
        self._api: ApiExchange | None = None
        self._successor: asyncio.BaseProtocol | None = None
        self._pauses = 0
        self._closing = False
        self._eof = False
        self._lingered = 0
        self._since = 0.0  # when the head began or the last exchange ended

    # What the transport tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        peer = get_remote_addr(self._transport)
        self.address = peer[0].encode() if peer is not None else b"unknown"
        self._secure = is_ssl(self._transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # finds clients that vanished
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        self._since = self._loop.time()
        self._server_state.connections.add(self)  # type: ignore[arg-type]  # it is one in all but name
        refused = self.plane.connected(self, self._loop)
        if refused is not None:
            self._refuse(refused)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._forget()
        exchange, self._exchange = self._exchange, None
        if exchange is not None and exchange is not self._api:
            exchange.client_lost(exc)
        if self._api is not None:
            self._api.client_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            self._lingered += len(data)
            if self._lingered > LINGER_LIMIT:
                self._transport.close()
            return
        while data and not self._closing:
            if self._body is not None:
                data = self._take_body(data)
            elif self._exchange is not None:
                self._waiting += data
                self._pause(_NEXT)
                return
            elif self._successor is not None:
                cast(asyncio.Protocol, self._successor).data_received(data)
                return
            else:
                data = self._take_head(data)

    def eof_received(self) -> bool:
        self._eof = True
        if self._closing or self._exchange is None:
            return False
        if self._body is not None:
            return self._exchange.request_eof() and not self._secure
        return not self._secure  # the request is complete: a client may close its half and read on

    def pause_writing(self) -> None:
        self.full = True
        if self._exchange is not None:
            self._exchange.client_full(True)

    def resume_writing(self) -> None:
        self.full = False
        if self._exchange is not None:
            self._exchange.client_full(False)

    # What the server tells.

    def shutdown(self) -> None:
        """End the connection as soon as the exchange under way is over (called by uvicorn)."""
        self.stopping = True
        if self._exchange is None:
            self._transport.close()
        elif self._exchange is self._api:
            self._api.shutdown()
        else:
            self._loop.call_later(SHUTDOWN_S, self.reset)

    @property
    def waits_since(self) -> float | None:
        """See `Connection.waits_since`."""
        return None if self._exchange is not None or self._closing else self._since

    def drop(self) -> None:
        """See `Connection.drop`."""
        self._close()

    def sweep(self, now: float) -> None:
        """See `Connection.sweep`."""
        if self._closing:
            return
        limits = self.plane.limits
        if self._exchange is not None:
            coming = self._body is not None and not self._pauses and self._exchange is self._api
            if coming and now - self._since > limits.head_s:
                self.reset()
            return
        if self._head and now - self._since > limits.head_s:
            self._refuse(NeverComplete(f"the request's head was not complete after {limits.head_s:g} s"))
        elif now - self._since > limits.idle_s:
            self._transport.close()

    # The request's side.

    def _take_head(self, data: bytes) -> bytes:
        """Take a request's head from the data and begin its exchange; returns what is left."""
        head = self._head
        if not head or head == b"\r":  # empty lines before a request are allowed (RFC 9112, 2.2)
            data = bytes(head) + data
            head.clear()
            while data.startswith(b"\r\n"):
                data = data[2:]
            end, source = data.find(END), data
        else:
            start = max(0, len(head) - len(END) + 1)
            head += data
            end = head.find(END, start)
            source = bytes(head) if end >= 0 else b""
        if end < 0:
            self._keep_partial(data)
            return b""
        head.clear()
        if end > self.plane.limits.head_bytes:
            self._refuse_long_head()
            return b""
        self._begin(source[: end + 2])
        return source[end + len(END) :]

    def _keep_partial(self, data: bytes) -> None:
        head, checked = self._head, 0
        if head:
            checked = max(0, len(head) - len(data))
        elif data:
            head += data
            self._since = self._loop.time()
        if head != b"\r" and never_a_head(head, checked):
            self._refuse(Malformed(_NO_TLS if head[:1] == TLS_HANDSHAKE else "the request is malformed"))
        elif len(head) > self.plane.limits.head_bytes + len(END):
            self._refuse_long_head()

    def _begin(self, raw: bytes) -> None:
        try:
            head = parse_request(raw, self._memory)
            self._body = request_body(head)
            if head.method == b"CONNECT":
                raise Malformed("this is no forward proxy")
        except Malformed as error:
            self._refuse(error)
            return
        try:
            where = self.plane.resolve(head, None if self._order is None else self._order.passage)
        except InvalidRequest as error:
            where = answers.of_error(error)
        if where is None:
            self._begin_api(request_to_api(head))
        elif isinstance(where, Passage):
            self._begin_relay(where, self._body is not None)
        elif isinstance(where, str):
            wake_s = self.plane.limits.wake_s
            self._exchange = Waking(self, self.plane.directory, where, head, self._body is not None, wake_s)
            self._exchange.start()
        else:
            self.answer(head, where)
            return
        if self._body is None and self._exchange is not None:
            self._exchange.request_data(b"", True)

    def _begin_api(self, head: bytes) -> None:
        if self._api is None:
            self._api = ApiExchange(
                self, self, self._transport, self._config, self._server_state, self._app_state, self._loop
            )
        self._exchange = self._api
        self._since = self._loop.time()
        self._api.begin(head)

    def _take_body(self, data: bytes) -> bytes:
        """Pass on what of the data belongs to the body; returns what is left."""
        body, exchange = self._body, self._exchange
        if body is None or exchange is None:
            return data
        if self._exchange is self._api:
            self._since = self._loop.time()
        try:
            taken = body.feed(data)
        except Malformed as error:
            self._break_off(exchange, error)
            return b""
        if body.done:
            self._body = None
        if taken == len(data):
            exchange.request_data(data, body.done)
            return b""
        exchange.request_data(data[:taken], body.done)
        return data[taken:]

    def _begin_relay(self, passage: Passage, has_body: bool) -> None:
        order = self._order
        if order is None or order.passage is not passage:
            order = Order(passage, self.address, self.scheme_of(passage.head), has_body)
            self._order = order
        kind = Forwarded if passage.target.raw else Relay
        relay = kind(self, self.plane, self._loop, order)
        self._exchange = relay
        relay.start()

    def woken(self, waiting: Waking) -> None:
        """The sandbox that a request waited for runs, or does not: the request goes its way."""
        if self._exchange is not waiting or self._closing:
            return
        where = self.plane.resolve(waiting.head)
        if not isinstance(where, Passage):
            gone = answers.not_awake if waiting.late else answers.not_found
            self.answer(waiting.head, where if isinstance(where, dict) else gone(waiting.sandbox_id))
            return
        self._begin_relay(where, waiting.has_body)
        if self.full and self._exchange is not None:
            self._exchange.client_full(True)
        self.hold_body(False)
        for data, last in waiting.kept:
            if self._exchange is not None:
                self._exchange.request_data(data, last)

    # What exchanges ask for.

    def scheme_of(self, head: RequestHead) -> bytes:
        """`http` or `https`, as the client spoke it. A proxy on this host that ended TLS is believed."""
        if self._secure:
            return b"https"
        told = head.noted.get(b"x-forwarded-proto", b"").lower()
        return told if told in (b"http", b"https") and self.address in _LOOPBACK else b"http"

    def write(self, data: bytes) -> None:
        """See `Client.write`."""
        if not self._closing:
            self._transport.write(data)

    def write_eof(self) -> bool:
        """See `Client.write_eof`."""
        if self._closing or not self._transport.can_write_eof():
            return False
        self._transport.write_eof()
        return True

    def hold_body(self, hold: bool) -> None:
        """See `Client.hold_body`."""
        if hold:
            self._pause(_BODY)
        else:
            self._resume(_BODY)

    def tunnel(self) -> None:
        """See `Client.tunnel`."""
        self._body = UntilClose()
        self._take_waiting()
        if self._eof and self._exchange is not None and not self._exchange.request_eof():
            self._close()

    def finish(self, keep: bool) -> None:
        """See `Client.finish`."""
        self._exchange = self._body = None
        self._resume(_BODY | _API)
        if self._closing:
            return
        if not keep or self.stopping:
            self._close()
            return
        self._since = self._loop.time()
        if self._waiting:
            self._take_waiting()
        if self._eof and self._exchange is None:
            self._close()

    def answer(self, head: RequestHead, payload: Payload) -> None:
        """See `Client.answer`."""
        body = self._body
        too_much = isinstance(body, Sized) and body.remaining > DISCARD_LIMIT
        unsure = body is not None and head.expects_continue  # whether it will be sent at all
        keep = head.keep_alive and not self.stopping and not too_much and not unsure
        self.write(answers.message(payload, head, close=not keep))
        if body is None:
            self.finish(keep)
        elif keep:
            self._exchange = Discard(self)
            self._resume(_BODY)
        else:
            self.give_up_body()

    def give_up_body(self) -> None:
        """See `Client.give_up_body`. Closing at once would reset the connection, and the client, still
        sending, might never read the answer; so its bytes are dropped for a moment."""
        self._exchange = self._body = None
        if self._closing:
            return
        self.write_eof()
        self._closing = True
        self._resume(_BODY | _NEXT | _API)
        self._loop.call_later(LINGER_S, self._transport.close)

    def reset(self) -> None:
        """See `Client.reset`."""
        self._closing = True
        sock = self._transport.get_extra_info("socket")
        if sock is not None and not self._transport.is_closing():
            # A close with this set sends a reset; without, an answer that ends by close would look whole.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def api_paused(self, paused: bool) -> None:
        """See `Lender.api_paused`."""
        if paused:
            self._pause(_API)
        else:
            self._resume(_API)

    def api_took_over(self, protocol: asyncio.BaseProtocol) -> None:
        """See `Lender.api_took_over`."""
        self._successor, self._api = protocol, None
        self._exchange = self._body = None
        self._resume(_BODY | _NEXT | _API)
        self._forget()

    # Small change.

    def _break_off(self, exchange: Exchange, error: Malformed) -> None:
        unanswered = exchange.abandon()
        if exchange is self._api:
            self._api = None
        self._exchange = None
        if unanswered:
            self._refuse(error)
        else:
            self.reset()

    def _refuse_long_head(self) -> None:
        limit = self.plane.limits.head_bytes
        self._refuse(HeadTooLarge(f"the request's head is longer than {limit} bytes"))

    def _refuse(self, error: AenvError) -> None:
        self._body = None
        self.write(answers.message(answers.of_error(error), None, close=True))
        self.give_up_body()

    def _close(self) -> None:
        self._closing = True
        self._transport.close()

    def _forget(self) -> None:
        self._server_state.connections.discard(self)
        self.plane.disconnected(self)

    def _take_waiting(self) -> None:
        data = bytes(self._waiting)
        self._waiting.clear()
        self._resume(_NEXT)
        self.data_received(data)

    def _pause(self, reason: int) -> None:
        if not self._pauses and not self._transport.is_closing():
            self._transport.pause_reading()
        self._pauses |= reason

    def _resume(self, reason: int) -> None:
        paused, self._pauses = self._pauses, self._pauses & ~reason
        if paused and not self._pauses and not self._transport.is_closing():
            self._transport.resume_reading()


def front_protocol(
    directory: Directory, settings: Settings, may_forward: MayForward | None = None
) -> type[Front]:
    """The protocol class for `uvicorn.Config(http=...)`, bound to a data plane of its own (`.plane`).

    Args:
        directory: the sandboxes.
        settings: the node's.
        may_forward: who may have ports forwarded; without it nobody may.
    """
    plane = DataPlane(directory, settings, may_forward)
    return type("BoundFront", (Front,), {"plane": plane})
