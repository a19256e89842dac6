"""One request to a guest and its answer, bodies passed as they come, each way at the other's pace.

Nothing is sent twice, with one exception: a connection kept from an earlier request may have been
closed by the guest at the moment it was taken up again. If then not one byte of an answer came, a
request without a body whose method is safe (RFC 9110, 9.2.1) is sent once more on a new connection.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from agentenv.proxy import answers
from agentenv.proxy.answers import Payload
from agentenv.proxy.dial import dial
from agentenv.proxy.directory import Route
from agentenv.proxy.exchange import Client
from agentenv.proxy.forward import answer_to_client
from agentenv.proxy.framing import Body, Malformed, UntilClose
from agentenv.proxy.head import END, AnswerHead, answer_body, parse_answer
from agentenv.proxy.limits import Limits
from agentenv.proxy.order import Order
from agentenv.proxy.upstream import Pool, Upstream, idle_time

HELD_LIMIT = 64 * 1024  # bytes of a body that are taken before there is a connection for them


class Relays(Protocol):
    """The relays under way, and what they share."""

    pool: Pool
    limits: Limits

    def enter(self, relay: Relay) -> None:
        """Count it in; the end of its machine's generation will be told to it."""

    def leave(self, relay: Relay) -> None:
        """Count it out."""

    def current(self, route: Route) -> bool:
        """Whether the route still leads to a running sandbox."""


class Relay:
    """See the module."""

    # Most exchanges change few of these.
    _upstream: Upstream | None = None
    _dialing: asyncio.Task[None] | None = None
    _held: list[bytes] | None = None  # of the body, until there is a connection for it
    _held_bytes = 0
    _over = False
    _request_done = False
    _body_began = False
    _partial: bytearray | None = None  # an answer's head that is not complete
    _answered = False  # bytes of an answer went to the client
    _answer: AnswerHead | None = None
    _answer_body: Body | None = None
    _answer_done = False
    _tunnel = False
    _guest_ended = False
    _moved = False  # bytes came since the last sweep
    _still_since: float | None = None  # of which it was the first without

    def __init__(
        self,
        client: Client,
        relays: Relays,
        loop: asyncio.AbstractEventLoop,
        order: Order,
    ) -> None:
        self._client = client
        self._relays = relays
        self._loop = loop
        self._order = order
        self._key = order.key
        self._head = head = order.passage.head
        self._replayable = order.replayable
        self._keep = head.keep_alive
        self._reusable = head.minor == 1

    def start(self) -> None:
        """Hand the request to a connection, an idle one or a new one."""
        self._relays.enter(self)
        upstream = self._relays.pool.take(self._key, self._loop.time())
        if upstream is not None:
            self._attach(upstream)
        else:
            self._replayable = False
            self._dial()

    # What the client does.

    def request_data(self, data: bytes, last: bool) -> None:
        """See `Exchange.request_data`."""
        if data:
            self._body_began = self._moved = True
            if self._upstream is not None:
                self._upstream.transport.write(data)
            elif self._dialing is not None:
                self._held = [*(self._held or ()), data]
                self._held_bytes += len(data)
                if self._held_bytes > HELD_LIMIT:
                    self._client.hold_body(True)
        if last:
            self._request_done = True
            self._end_if_done()

    def request_eof(self) -> bool:
        """See `Exchange.request_eof`."""
        if not self._tunnel or self._upstream is None:
            return False  # half a request is none: the connection ends, and so the guest's
        if self._guest_ended:
            return False
        self._request_done = True
        self._upstream.transport.write_eof()
        return True

    def client_lost(self, error: Exception | None) -> None:
        """See `Exchange.client_lost`."""
        if self._over:
            return
        upstream = self._upstream
        if self._tunnel and error is None and upstream is not None:
            self._upstream = upstream.user = None
            upstream.transport.close()  # what the client sent before its end still goes out
        self._end()

    def abandon(self) -> bool:
        """See `Exchange.abandon`."""
        self._end()
        return not self._answered

    def client_full(self, full: bool) -> None:
        """See `Exchange.client_full`."""
        if self._upstream is not None and not self._upstream.transport.is_closing():
            if full:
                self._upstream.transport.pause_reading()
            else:
                self._upstream.transport.resume_reading()

    @property
    def sandbox_id(self) -> str:
        """Whose guest answers."""
        return self._key.sandbox_id

    def serves(self, sandbox_id: str, generation: int) -> bool:
        """Whether that machine is the one that answers."""
        return self._key[:2] == (sandbox_id, generation)

    def generation_ended(self) -> None:
        """The machine is gone: the client must not take what it has for a whole answer."""
        if self._over:
            return
        dispatched = self._upstream is not None or self._answered
        self._end()
        if dispatched:
            self._client.reset()
        else:
            self._client.answer(self._head, self._gone())

    def sweep(self, now: float, limits: Limits) -> None:
        """End it if the guest takes too long to begin its answer, or nothing has moved for too long."""
        if self._moved or self._dialing is not None or self._still_since is None:
            self._moved, self._still_since = False, now
            return
        answerless = self._request_done and self._answer is None and not self._tunnel
        limit = limits.answer_s if answerless else limits.still_s
        if limit and now - self._still_since > limit:
            self._break_off(answers.too_slow(self._key.sandbox_id, self._key.port))

    # The connection to the guest.

    def _dial(self) -> None:
        self._dialing = self._loop.create_task(self._dialled())

    async def _dialled(self) -> None:
        route = self._order.passage.route
        upstream = await dial(route, self._key.port, self._relays.current, self._relays.limits.connect_s)
        self._dialing = None
        if upstream is not None:
            self._attach(upstream)
            return
        port = self._key.port
        current = self._relays.current(route)
        self._fail(answers.port_closed(route.sandbox_id, port) if current else self._gone())

    def _gone(self) -> Payload:
        return answers.not_found(self._key.sandbox_id)

    def _attach(self, upstream: Upstream) -> None:
        self._upstream = upstream
        upstream.user = self
        self._open(upstream)
        if self._held is not None:
            upstream.transport.writelines(self._held)
            self._held = None
            self._client.hold_body(False)
        if self._client.full:
            upstream.transport.pause_reading()

    def _open(self, upstream: Upstream) -> None:
        """Say to a new connection what it is for."""
        upstream.transport.write(self._order.request)

    def upstream_full(self, full: bool) -> None:
        """See `User.upstream_full`."""
        self._client.hold_body(full)

    def upstream_lost(self, error: Exception | None) -> None:
        """See `User.upstream_lost`."""
        self._upstream = None
        if self._over:
            return
        if self._tunnel and (error is None or self._guest_ended):
            self._end()
            self._client.finish(False)
        elif self._answer_done:
            self._end()
            self._client.give_up_body()
        elif error is None and isinstance(self._answer_body, UntilClose) and not self._tunnel:
            self._finish_answer(excess=False)
        elif self._replayable and not self._answered and not self._partial:
            self._replayable = False
            self._dial()
        else:
            self._fail_dispatched("The sandbox closed the connection without answering")

    # What the guest does.

    def answer_data(self, data: bytes) -> None:
        """See `User.answer_data`."""
        self._moved = True
        if self._tunnel:
            self._client.write(data)
            return
        try:
            while data and self._answer is None and not self._over:
                data = self._pass_head(data)
            if data and not self._over:
                self._pass_body(data, b"")
        except Malformed as error:
            self._fail_dispatched(f"The sandbox sent an answer that is not valid HTTP: {error.message}")

    def answer_eof(self) -> bool:
        """See `User.answer_eof`."""
        if not self._tunnel or self._over:
            return False  # the loss of the connection, which follows, tells what to do
        self._guest_ended = True
        if self._request_done:
            return False
        return self._client.write_eof()

    def _pass_head(self, data: bytes) -> bytes:
        """Take an answer's head from the data and send it on, a final one with its body; returns the rest."""
        if self._partial is None:
            source, end = data, data.find(END)
        else:
            start = max(0, len(self._partial) - len(END) + 1)
            self._partial += data
            source, end = b"", self._partial.find(END, start)
            if end >= 0:
                source = bytes(self._partial)
        if end < 0:
            if self._partial is None:
                self._partial = bytearray(data)
            self._check_size(len(self._partial))
            return b""
        self._partial = None
        self._check_size(end)
        raw, rest = source[: end + 2], source[end + len(END) :]
        answer = parse_answer(raw, None if self._upstream is None else self._upstream.memory)
        if answer.status < 200:
            return self._pass_interim(answer, raw, rest)
        self._answer = answer
        self._answer_body = answer_body(answer, self._head.method)
        unending = isinstance(self._answer_body, UntilClose)
        # A client that waits for a 100 and gets the answer may send the body or not: no request can
        # be told to begin after that.
        unsent = self._head.expects_continue and not self._request_done and not self._body_began
        self._keep = self._keep and not unending and not unsent and not self._client.stopping
        self._reusable = (
            self._reusable and not unending and answer.minor == 1 and b"close" not in answer.options
        )
        self._pass_body(rest, answer_to_client(answer, raw, not self._keep))
        return b""

    def _check_size(self, size: int) -> None:
        limit = self._relays.limits.head_bytes
        if size > limit:
            raise Malformed(f"its head is longer than {limit} bytes")

    def _pass_interim(self, answer: AnswerHead, raw: bytes, rest: bytes) -> bytes:
        switching = answer.status == 101
        if switching and not (self._order.upgrade and self._request_done):
            raise Malformed("it changes the protocol without having been asked")
        if switching or self._head.minor == 1:
            self._send(answer_to_client(answer, raw, False))
        if not switching:
            return rest
        if rest:
            self._client.write(rest)
        self._begin_tunnel()
        return b""

    def _begin_tunnel(self) -> None:
        self._tunnel = True
        self._request_done = False
        self._client.tunnel()

    def _pass_body(self, data: bytes, before: bytes) -> None:
        """Send on what of the data belongs to the body, in one write with `before`; the rest is dropped."""
        body = self._answer_body
        taken = body.feed(data) if body is not None and data else 0
        part = data if taken == len(data) else data[:taken]
        self._send(before + part if before else part)
        if body is None or body.done:
            self._finish_answer(excess=taken < len(data))

    def _send(self, data: bytes) -> None:
        self._answered = True
        self._client.write(data)

    # The end.

    def _finish_answer(self, excess: bool) -> None:
        self._answer_done = True
        self._reusable = self._reusable and not excess
        if not self._request_done and (self._upstream is None or not self._reusable or not self._keep):
            self._end()
            self._client.give_up_body()
        else:
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self._over or not (self._request_done and self._answer_done):
            return
        upstream = self._upstream
        if upstream is not None and self._reusable and upstream.quiet():
            self._upstream = None
            upstream.user = None
            if self._client.full:
                upstream.transport.resume_reading()
            hint = self._answer.noted.get(b"keep-alive") if self._answer is not None else None
            self._relays.pool.give(upstream, self._loop.time(), idle_time(self._key.port, hint))
        self._end()
        self._client.finish(self._keep)

    def _fail(self, payload: Payload) -> None:
        """Nothing was sent to the client yet: it gets an answer that says what is wrong."""
        self._end()
        self._client.answer(self._head, payload)

    def _fail_dispatched(self, reason: str) -> None:
        """The guest broke off."""
        self._break_off(answers.no_answer(self._key.sandbox_id, self._key.port, reason))

    def _break_off(self, payload: Payload) -> None:
        """End it with that answer. What the client has of another one must not look whole."""
        if self._answered:
            self._end()
            self._client.reset()
        else:
            self._fail(payload)

    def _end(self) -> None:
        """Let go of everything."""
        self._over = True
        self._relays.leave(self)
        if self._dialing is not None:
            self._dialing.cancel()
        self._dialing = None
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.user = None
            upstream.transport.abort()
