"""Ports of a sandbox, reached through ports here: each connection becomes one through the node."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from agentenv.cli.attached.ways import HEAD_END, OPEN_LIMIT_S, Way, refusal, refused
from agentenv.errors import AenvError, HostFault, InvalidRequest

PIECE = 256 * 1024

_FORM = re.compile(r"(?:(?P<bind>\[[0-9A-Fa-f:]+\]|[^:\[\]]*):)??(?:(?P<local>\d+):)?(?P<remote>\d+)")


@dataclass(frozen=True)
class Pair:
    """A port here, at an address, and one in the sandbox."""

    bind: str
    local: int
    remote: int


def parse_pair(text: str) -> Pair:
    """`[[BIND:]LOCAL:]REMOTE`; the same port on both sides without LOCAL, and any free one for 0.

    Raises:
        InvalidRequest: it is not that.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"{text!r} is not [BIND:]LOCAL:REMOTE", remedy="such as 8080:80, or 0.0.0.0:8080:80"
        )
    remote = int(match["remote"])
    local = int(match["local"]) if match["local"] is not None else remote
    if match["bind"] is not None and match["local"] is None:
        raise InvalidRequest(
            f"{text!r} is not [BIND:]LOCAL:REMOTE", remedy=f"{match['bind']}:{remote}:{remote}"
        )
    if not (0 <= local <= 0xFFFF and 0 < remote <= 0xFFFF):
        raise InvalidRequest(f"{text!r}: ports are up to 65535")
    return Pair((match["bind"] or "127.0.0.1").strip("[]"), local, remote)


class Forwarding:
    """Listens for all pairs and serves until it is cancelled.

    Args:
        way: to the sandbox.
        say: takes a message about a connection that could not be made.
    """

    def __init__(self, way: Way, say: Callable[[str], None]) -> None:
        self._way = way
        self._say = say

    async def run(self, pairs: list[Pair], ready: Callable[[Pair, str, int], None]) -> None:
        """Serve for ever; `ready` is told the address and port of each pair.

        Raises:
            HostFault: a port here cannot be had.
        """
        servers: list[asyncio.Server] = []
        try:
            for pair in pairs:  # one by one: those before a failure are closed again
                servers += [await self._listen(pair)]
            for pair, server in zip(pairs, servers, strict=True):
                host, port = server.sockets[0].getsockname()[:2]
                ready(pair, host, port)
            await asyncio.Event().wait()
        finally:
            for server in servers:
                server.close()

    async def _listen(self, pair: Pair) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(pair, reader, writer)

        try:
            return await asyncio.start_server(serve, pair.bind, pair.local, limit=PIECE)
        except OSError as error:
            raise HostFault(
                f"cannot listen on {pair.bind} port {pair.local}: {error.strerror}",
                remedy="name another port, or 0 for any free one",
            ) from error

    async def _serve(self, pair: Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until both directions are over; a break of either side breaks the other."""
        try:
            there, to_there = await _open(self._way, pair.remote)
        except (AenvError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            self._say(f"port {pair.remote}: {getattr(error, 'message', None) or error or 'no answer'}")
            _reset(writer)
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pass_on(reader, to_there))
                both.create_task(_pass_on(there, writer))
            to_there.close()
            writer.close()
        except* OSError:
            pass  # a reset, which is passed on
        finally:
            for each in (writer, to_there):
                if not each.is_closing():
                    _reset(each)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a broken one, which its other side does not take for a proper end."""
    if (way := writer.get_extra_info("socket")) is not None:
        way.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All bytes of one direction, at the reader's pace, and its end."""
    while data := await reader.read(PIECE):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _open(way: Way, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As `Way.connect`; OSError if the node does not answer."""
    reader, writer = await asyncio.open_connection(way.host, way.port, ssl=way.tls, limit=PIECE)
    try:
        writer.write(way.request(port))
        async with asyncio.timeout(OPEN_LIMIT_S):
            head = await reader.readuntil(HEAD_END)
            if (size := refused(head)) is not None:
                raise refusal(head, await reader.readexactly(size))
    except BaseException:
        writer.close()
        raise
    return reader, writer
