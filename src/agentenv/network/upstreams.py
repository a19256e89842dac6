"""The name servers that guests' questions go on to: which they are, and how they are asked."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import struct
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from agentenv.errors import InvalidRequest
from agentenv.network.messages import REFUSED, SERVFAIL, answers, code, is_truncated

RESOLV_CONF = Path("/etc/resolv.conf")
ROUNDS_S = (1.0, 2.5)  # how long each upstream is waited for, in the first and in the second round

Endpoint = tuple[str, int]  # an address and a port

_log = logging.getLogger(__name__)


class Upstreams:
    """Where questions go: the given servers, else those of the host's resolv.conf as it is now."""

    def __init__(self, given: Sequence[str] = (), file: Path = RESOLV_CONF) -> None:
        self._given = [_endpoint(text) for text in given]
        self._file = file
        self._stamp: tuple[int, int] | None = None
        self._read: list[Endpoint] = []

    def current(self) -> list[Endpoint]:
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


def nameservers(text: str) -> list[Endpoint]:
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


def _endpoint(text: str) -> Endpoint:
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


async def forward(
    question: bytes,
    servers: Sequence[Endpoint],
    *,
    stream: bool,
    whole: bool = False,
    rounds: Sequence[float] = ROUNDS_S,
) -> bytes | None:
    """The answer of the first server that has one, under the question's id; None when none answers.

    One after the other is asked, twice; a failure that one reports is the last resort.

    Args:
        question: the message to pass on.
        servers: in order of preference.
        stream: whether to ask over TCP first, as who asks did.
        whole: whether an answer that was cut is asked for again over TCP.
        rounds: seconds each server is waited for, per round.
    """
    reported = None
    for seconds in rounds:
        for server in servers:
            answer = await _ask(question, server, seconds, stream=stream)
            if answer is not None and whole and is_truncated(answer):
                answer = await _ask(question, server, seconds, stream=True)
                if answer is not None and is_truncated(answer):  # it takes no streams, or breaks its word
                    answer = None
            if answer is None:
                continue
            if code(answer) not in (SERVFAIL, REFUSED):
                return answer
            reported = reported or answer
        if reported is not None:
            return reported
    return None


async def _ask(question: bytes, server: Endpoint, seconds: float, *, stream: bool) -> bytes | None:
    """One server's answer; None when there is none in time.

    The id towards the server is drawn anew and each question has a port of its own, so that
    answers cannot be forged by guessing. Over a stream where the guest uses one, with a
    datagram where the server takes none.
    """
    sent = secrets.token_bytes(2) + question[2:]
    for ask in (ask_stream, ask_datagram) if stream else (ask_datagram,):
        try:
            async with asyncio.timeout(seconds):
                answer = await ask(sent, server)
            return question[:2] + answer[2:]
        except TimeoutError:
            _log.debug("name server %s:%d did not answer in %s s", *server, seconds)
        except (OSError, EOFError) as error:
            _log.debug("name server %s:%d: %s", *server, error)
    return None


async def ask_datagram(question: bytes, server: Endpoint) -> bytes:
    """Ask over UDP from a port of its own.

    Raises:
        OSError: the server cannot be reached.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bytes] = loop.create_future()
    transport, _ = await loop.create_datagram_endpoint(lambda: _Answer(question, future), remote_addr=server)
    try:
        transport.sendto(question)
        return await future
    finally:
        transport.close()


async def ask_stream(question: bytes, server: Endpoint) -> bytes:
    """Ask over TCP.

    Raises:
        OSError, EOFError: the server cannot be reached, or hung up, or answered something else.
    """
    reader, writer = await asyncio.open_connection(*server)
    try:
        writer.write(struct.pack(">H", len(question)) + question)
        answer = await read_message(reader)
        if not answers(answer, question):
            raise OSError("the answer is to another question")
        return answer
    finally:
        writer.close()


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """One message of a stream: its length in two bytes, then the message.

    Raises:
        EOFError, OSError: it ends before.
    """
    (size,) = struct.unpack(">H", await reader.readexactly(2))
    return await reader.readexactly(size)


class _Answer(asyncio.DatagramProtocol):
    def __init__(self, question: bytes, future: asyncio.Future[bytes]) -> None:
        self._question = question
        self._future = future

    def datagram_received(self, data: bytes, addr: Endpoint) -> None:
        if not self._future.done() and answers(data, self._question):
            self._future.set_result(data)

    def error_received(self, exc: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(exc if isinstance(exc, OSError) else OSError(os.strerror(0)))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._future.done():
            self._future.cancel()
