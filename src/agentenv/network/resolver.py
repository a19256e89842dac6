"""The name server that guests see: it passes questions on to the node's upstreams, or to a sandbox's own.

Guests ask their gateway's port 53; the slot's namespace leads that here, to the node's address,
with the slot's address as the source, so that it is known who asks. It answers as long as the
node runs; while a node restarts, its guests' lookups wait or fail.

Where a sandbox may reach everything but what is denied, messages are not interpreted beyond their header, so
EDNS and record types to come pass through. Where it may reach nothing but what is allowed, only lookups
of allowed names are answered. Nothing of the guest's own leaves the host then but name and type: the
question is written anew, and so is the answer, after the addresses in it have been opened.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from agentenv.errors import AenvError, HostFault
from agentenv.network import lookups, messages
from agentenv.network.applied import Asker
from agentenv.network.messages import FORMERR, INTERNET, NOTIMP, REFUSED, SERVFAIL, failure
from agentenv.network.nft import RESOLVER_PORT
from agentenv.network.policy import Address
from agentenv.network.refusals import Refusals
from agentenv.network.upstreams import ROUNDS_S, Endpoint, Upstreams, forward, read_message

CONCURRENT = 512
CONCURRENT_PER_GUEST = 64
STREAMS = 256
STREAMS_PER_GUEST = 32
STREAM_IDLE_S = 10.0
# Bytes of what is read where names are allowed; a record takes some 50 us of it. Long answers are read
# aside, so that the loop goes on with its other work.
QUESTION_MAX = 1024
ANSWER_MAX = 16384
_ASIDE = 1024
_DNS_PORT = 53

_log = logging.getLogger(__name__)


class Gate(Protocol):
    """Who asks, and the opening of what was found; see network.slots.Slots."""

    def asker_at(self, address: str) -> Asker | None: ...
    def may_serve(self, server: Address) -> bool: ...
    async def open(self, asker: Asker, name: str, found: Sequence[tuple[Address, float]]) -> bool: ...


class Resolver:
    """Listens for guests' questions over UDP and TCP.

    Args:
        address: the node's address towards its guests.
        upstreams: where to pass questions on to, but for sandboxes with servers of their own.
        gate: who asks, by address, and what opens addresses for them.
        port: to listen on; 0 takes a free one.
        rounds: seconds each upstream is waited for, per round.
        refusals: where lookups that rules refuse are recorded.
    """

    def __init__(
        self,
        address: str,
        upstreams: Upstreams,
        gate: Gate,
        *,
        port: int = RESOLVER_PORT,
        rounds: Sequence[float] = ROUNDS_S,
        refusals: Refusals | None = None,
    ) -> None:
        self._address = address
        self._upstreams = upstreams
        self._gate = gate
        self.refusals = refusals or Refusals()
        self._port = port
        self._rounds = rounds
        self._transport: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None
        self._running: Counter[str] = Counter()  # questions in progress, by who asks
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: dict[asyncio.StreamWriter, str] = {}  # and who asks by it

    @property
    def port(self) -> int:
        """The port in use, once started."""
        return self._port

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            HostFault: the address is not there, or its port is taken.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await asyncio.start_server(self._serve_stream, self._address, self._port)
            self._port = self._server.sockets[0].getsockname()[1]
            self._transport, _ = await loop.create_datagram_endpoint(
                lambda: _Questions(self._on_datagram), (self._address, self._port)
            )
        except OSError as error:
            await self.stop()
            raise HostFault(
                f"the resolver cannot listen on {self._address}:{self._port}: {error.strerror or error}",
                remedy="see what else listens there: ss -lnp",
            ) from error

    async def stop(self) -> None:
        """Stop listening; questions in progress stay unanswered."""
        if self._transport is not None:
            self._transport.close()
        if self._server is not None:
            self._server.close()
        for writer in self._streams:
            writer.transport.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_datagram(self, question: bytes, source: tuple[str, int]) -> None:
        task = asyncio.ensure_future(self._answer_datagram(question, source))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_datagram(self, question: bytes, source: tuple[str, int]) -> None:
        answer = await self._resolve(question, source[0], stream=False)
        if answer is not None and self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(answer, source)

    async def _serve_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = writer.get_extra_info("peername")[0]
        own = sum(other == source for other in self._streams.values())
        if len(self._streams) >= STREAMS or own >= STREAMS_PER_GUEST:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._streams[writer] = source
        self._tasks.add(task)
        try:
            await self._answer_stream(reader, writer, source)
        except (OSError, EOFError, TimeoutError):
            pass  # the guest went away or sent half a question
        finally:
            self._streams.pop(writer, None)
            self._tasks.discard(task)
            writer.close()

    async def _answer_stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str
    ) -> None:
        while True:
            async with asyncio.timeout(STREAM_IDLE_S):
                question = await read_message(reader)
            answer = await self._resolve(question, source, stream=True)
            if answer is None:
                return
            writer.write(struct.pack(">H", len(answer)) + answer)
            async with asyncio.timeout(STREAM_IDLE_S):
                await writer.drain()

    async def _resolve(self, question: bytes, source: str, *, stream: bool) -> bytes | None:
        """The answer for whoever asks from `source`; None for what is no question at all."""
        if not messages.is_question(question):
            return None
        if messages.questions(question) != 1:
            return failure(question, FORMERR)
        asker = self._gate.asker_at(source)
        if asker is None:
            return failure(question, REFUSED)
        with self._room(source) as room:
            if not room:
                return failure(question, SERVFAIL)
            if asker.policy.by_names:
                return await self._answer_allowed(question, asker, stream=stream)
            servers = self._servers(asker)
            answer = await forward(question, servers, stream=stream, rounds=self._rounds)
            return answer or failure(question, SERVFAIL)

    async def _answer_allowed(self, question: bytes, asker: Asker, *, stream: bool) -> bytes:
        """The answer to one who may reach nothing but what is allowed."""
        asked = messages.asked(question)
        if asked is None or len(question) > QUESTION_MAX:
            return failure(question, FORMERR)
        if not messages.is_query(question):
            return failure(question, NOTIMP)
        name, servers = asked.name, self._servers(asker)
        if name is None or asked.rdclass != INTERNET or not servers or not asker.policy.answers(name):
            self.refusals.note(asker.owner, name or asked.odd)
            return messages.forbidden(question)
        found = lookups.NOTHING
        if not lookups.withheld(asked.type):
            plain = messages.plain_question(name, asked.type)
            answer = await forward(plain, servers, stream=False, whole=True, rounds=self._rounds)
            if answer is None or len(answer) > ANSWER_MAX:
                return failure(question, SERVFAIL)
            aside = len(answer) > _ASIDE
            understood = await asyncio.to_thread(lookups.read, answer) if aside else lookups.read(answer)
            if understood is None:
                return failure(question, SERVFAIL)
            found = understood
        written = lookups.write(question, found, stream=stream)
        if written is None:
            return failure(question, FORMERR)
        if written.whole and not await self._open(asker, name, found):
            return failure(question, SERVFAIL)  # the client asks again, by the rules of then
        return written.message

    async def _open(self, asker: Asker, name: str, found: lookups.Found) -> bool:
        """Open what is in an answer, so that whoever gets it can go there; whether it may be given."""
        if not found.addresses:
            return True
        opened = [(address, float(found.open_s)) for address in found.addresses]
        try:
            return await self._gate.open(asker, name, opened)
        except AenvError as error:
            _log.error("what %s is for %s cannot be opened: %s", name, asker.owner, error)
            return False

    def _servers(self, asker: Asker) -> list[Endpoint]:
        """The servers that a sandbox's questions go to: its own, as far as the node lets it have them."""
        own = asker.policy.dns_servers
        if own is None:
            return self._upstreams.current()
        return [(str(server), _DNS_PORT) for server in own if self._gate.may_serve(server)]

    @contextmanager
    def _room(self, source: str) -> Iterator[bool]:
        """Whether one more question may run; one guest cannot take all the room."""
        if self._running.total() >= CONCURRENT or self._running[source] >= CONCURRENT_PER_GUEST:
            yield False
            return
        self._running[source] += 1
        try:
            yield True
        finally:
            self._running[source] -= 1
            if not self._running[source]:
                del self._running[source]


class _Questions(asyncio.DatagramProtocol):
    def __init__(self, received: Callable[[bytes, tuple[str, int]], None]) -> None:
        self._received = received

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._received(data, addr)

    def error_received(self, exc: Exception) -> None:
        _log.debug("a guest took no answer: %s", exc)
