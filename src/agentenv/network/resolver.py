"""The name server that guests see: it passes their questions on to the node's upstreams.

Guests ask their gateway's port 53; the slot's namespace leads that here, to the node's address,
with the slot's address as the source, so that it is known who asks. It answers as long as the
node runs; while a node restarts, its guests' lookups wait or fail. Messages are not interpreted
beyond their header, so EDNS and record types to come pass through. Format: RFC 1035, section 4.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

from agentenv.errors import HostFault, InvalidRequest
from agentenv.network.nft import RESOLVER_PORT

RESOLV_CONF = Path("/etc/resolv.conf")
ROUNDS_S = (1.0, 2.5)  # how long each upstream is waited for, in the first and in the second round
CONCURRENT = 512
CONCURRENT_PER_GUEST = 64
STREAMS = 256
STREAMS_PER_GUEST = 32
STREAM_IDLE_S = 10.0

_HEADER = 12
_FORMERR, _SERVFAIL, _REFUSED = 1, 2, 5
_QR, _RD, _RA, _OPCODE = 0x8000, 0x0100, 0x0080, 0x7800

_log = logging.getLogger(__name__)


class Upstreams:
    """Where questions go: the given servers, else those of the host's resolv.conf as it is now."""

    def __init__(self, given: Sequence[str] = (), file: Path = RESOLV_CONF) -> None:
        self._given = [_endpoint(text) for text in given]
        self._file = file
        self._stamp: tuple[int, int] | None = None
        self._read: list[tuple[str, int]] = []

    def current(self) -> list[tuple[str, int]]:
        """Address and port of each, in order of preference."""
        if self._given:
            return self._given
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp != self._stamp:
                self._read = nameservers(self._file.read_text(errors="replace"))
                self._stamp = stamp
        except OSError:
            self._read = []
        return self._read or [("127.0.0.1", 53)]  # what the C library takes then


def nameservers(text: str) -> list[tuple[str, int]]:
    """The usable name servers of a resolv.conf, which knows no ports."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            try:
                ip_address(words[1].partition("%")[0])
            except ValueError:
                continue
            found.append((words[1], 53))
    return found


def _endpoint(text: str) -> tuple[str, int]:
    """`ADDRESS`, `ADDRESS:PORT` or `[IPv6]:PORT`."""
    host, port = text, "53"
    bracketed = re.fullmatch(r"\[(.+)\](?::(\d+))?", text)
    if bracketed:
        host, port = bracketed[1], bracketed[2] or "53"
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    try:
        number = int(port)
        if not 0 < number < 65536:
            raise ValueError
        return str(ip_address(host)), number
    except ValueError:
        raise InvalidRequest(
            f"nameservers: {text!r} is not an address",
            remedy="give addresses such as 9.9.9.9 or 10.0.0.2:5353",
        ) from None


class Resolver:
    """Listens for guests' questions over UDP and TCP.

    Args:
        address: the node's address towards its guests.
        upstreams: where to pass questions on to.
        port: to listen on; 0 takes a free one.
        rounds: seconds each upstream is waited for, per round.
    """

    def __init__(
        self,
        address: str,
        upstreams: Upstreams,
        *,
        port: int = RESOLVER_PORT,
        rounds: Sequence[float] = ROUNDS_S,
    ) -> None:
        self._address = address
        self._upstreams = upstreams
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
                question = await _read_message(reader)
            answer = await self._resolve(question, source, stream=True)
            if answer is None:
                return
            writer.write(struct.pack(">H", len(answer)) + answer)
            async with asyncio.timeout(STREAM_IDLE_S):
                await writer.drain()

    async def _resolve(self, question: bytes, source: str, *, stream: bool) -> bytes | None:
        """The answer for whoever asks from `source`; None for what is no question at all."""
        if len(question) < _HEADER or question[2] & (_QR >> 8):
            return None
        if struct.unpack_from(">H", question, 4)[0] != 1:
            return failure(question, _FORMERR)
        with self._room(source) as room:
            if not room:
                return failure(question, _SERVFAIL)
            return await self._forward(question, stream=stream) or failure(question, _SERVFAIL)

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

    async def _forward(self, question: bytes, *, stream: bool) -> bytes | None:
        """Ask one upstream after the other, twice; a failure that one reports is the last resort."""
        reported = None
        for seconds in self._rounds:
            for upstream in self._upstreams.current():
                answer = await self._ask(question, upstream, seconds, stream=stream)
                if answer is None:
                    continue
                if answer[3] & 0x0F not in (_SERVFAIL, _REFUSED):
                    return answer
                reported = reported or answer
            if reported is not None:
                return reported
        return None

    async def _ask(
        self, question: bytes, upstream: tuple[str, int], seconds: float, *, stream: bool
    ) -> bytes | None:
        """One upstream's answer, under the guest's own id; None when there is none in time.

        The id towards the upstream is drawn anew and each question has a port of its own, so that
        answers cannot be forged by guessing. Over a stream where the guest uses one, with a
        datagram where the upstream takes none.
        """
        sent = secrets.token_bytes(2) + question[2:]
        for ask in (ask_stream, ask_datagram) if stream else (ask_datagram,):
            try:
                async with asyncio.timeout(seconds):
                    answer = await ask(sent, upstream)
                return question[:2] + answer[2:]
            except TimeoutError:
                _log.debug("name server %s:%d did not answer in %s s", *upstream, seconds)
            except (OSError, EOFError) as error:
                _log.debug("name server %s:%d: %s", *upstream, error)
        return None


def failure(question: bytes, code: int) -> bytes:
    """An answer without records to a question: its header and question section, and a code."""
    (flags,) = struct.unpack_from(">H", question, 2)
    flags = _QR | flags & (_OPCODE | _RD) | _RA | code
    end = question_end(question)
    count = 0 if end == _HEADER else 1
    return question[:2] + struct.pack(">HHHHH", flags, count, 0, 0, 0) + question[_HEADER:end]


def question_end(message: bytes) -> int:
    """Where the first question of a message ends; the header's end if it cannot be read."""
    offset = _HEADER
    while offset < len(message) and message[offset]:
        if message[offset] > 63:  # a compressed name has no place in a question
            return _HEADER
        offset += 1 + message[offset]
    end = offset + 5  # the root label, type and class
    return end if end <= len(message) else _HEADER


def answers(answer: bytes, question: bytes) -> bool:
    """Whether a message is the answer to that question: id, and the question where it is repeated."""
    if len(answer) < _HEADER or answer[:2] != question[:2] or not answer[2] & (_QR >> 8):
        return False
    if answer[4:6] == b"\0\0":  # some servers leave the question out of an error
        return answer[3] & 0x0F != 0
    end = question_end(question)
    return answer[_HEADER:end].lower() == question[_HEADER:end].lower()


async def ask_datagram(question: bytes, upstream: tuple[str, int]) -> bytes:
    """Ask over UDP from a port of its own.

    Raises:
        OSError: the server cannot be reached.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bytes] = loop.create_future()
    transport, _ = await loop.create_datagram_endpoint(
        lambda: _Answer(question, future), remote_addr=upstream
    )
    try:
        transport.sendto(question)
        return await future
    finally:
        transport.close()


async def ask_stream(question: bytes, upstream: tuple[str, int]) -> bytes:
    """Ask over TCP.

    Raises:
        OSError, EOFError: the server cannot be reached, or hung up, or answered something else.
    """
    reader, writer = await asyncio.open_connection(*upstream)
    try:
        writer.write(struct.pack(">H", len(question)) + question)
        answer = await _read_message(reader)
        if not answers(answer, question):
            raise OSError("the answer is to another question")
        return answer
    finally:
        writer.close()


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack(">H", await reader.readexactly(2))
    return await reader.readexactly(size)


class _Questions(asyncio.DatagramProtocol):
    def __init__(self, received: Callable[[bytes, tuple[str, int]], None]) -> None:
        self._received = received

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._received(data, addr)

    def error_received(self, exc: Exception) -> None:
        _log.debug("a guest took no answer: %s", exc)


class _Answer(asyncio.DatagramProtocol):
    def __init__(self, question: bytes, future: asyncio.Future[bytes]) -> None:
        self._question = question
        self._future = future

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if not self._future.done() and answers(data, self._question):
            self._future.set_result(data)

    def error_received(self, exc: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(exc if isinstance(exc, OSError) else OSError(os.strerror(0)))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._future.done():
            self._future.cancel()
