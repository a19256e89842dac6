"""A small name server for tests, and the few parts of DNS messages that tests look at."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import ExitStack
from pathlib import Path

from agentenv.network import namespace


def question(name: str, *, identifier: int = 0x1234) -> bytes:
    """A recursive question for a name's IPv4 addresses."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack(">HHHHHH", identifier, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", 1, 1)


def answer(asked: bytes, address: str = "192.0.2.77", *, code: int = 0, flags: int = 0) -> bytes:
    """An answer with one address record, or none when the code is a failure's."""
    record = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + socket.inet_aton(address)
    header = struct.pack(">HHHHH", 0x8180 | flags | code, 1, 0 if code else 1, 0, 0)
    return asked[:2] + header + asked[12:] + (b"" if code else record)


def addresses(message: bytes) -> list[str]:
    """The addresses in an answer that this module made."""
    count = struct.unpack_from(">H", message, 6)[0]
    return [socket.inet_ntoa(message[-4:])] if count else []


def code(message: bytes) -> int:
    """The response code."""
    return message[3] & 0x0F


class Upstream:
    """A name server in a place (None: here) that answers every question alike.

    `transports` tells over what it was asked. With `silent` it never answers, with `failing` it
    answers with that code. A subclass answers by what is asked.
    """

    def __init__(
        self,
        place: Path | None = None,
        address: str = "127.0.0.1",
        port: int = 53,
        *,
        silent: bool = False,
        failing: int = 0,
        streams: bool = True,
        give: str = "192.0.2.77",
    ) -> None:
        self.transports: list[str] = []
        self.identifiers: list[bytes] = []
        self._silent, self._failing, self._give = silent, failing, give
        with ExitStack() as there:
            if place is not None:
                there.enter_context(namespace.inside(place))
            self._listener = socket.create_server((address, port))
            self.port: int = self._listener.getsockname()[1]
            self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._datagrams.bind((address, self.port))
        self._threads = [threading.Thread(target=self._serve_datagrams, daemon=True)]
        if streams:
            self._threads.append(threading.Thread(target=self._serve_streams, daemon=True))
        else:
            self._listener.close()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop serving."""
        for one in (self._datagrams, self._listener):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # not connected, but woken, or closed already
        for thread in self._threads:
            thread.join()
        self._datagrams.close()
        self._listener.close()

    def _reply(self, asked: bytes, transport: str) -> bytes | None:
        self.transports.append(transport)
        self.identifiers.append(asked[:2])
        return None if self._silent else self.answer(asked, transport)

    def answer(self, asked: bytes, transport: str) -> bytes:
        """The answer to a question."""
        return answer(asked, self._give, code=self._failing)

    def _serve_datagrams(self) -> None:
        while True:
            try:
                asked, source = self._datagrams.recvfrom(4096)
            except OSError:
                return
            if not asked:
                return
            reply = self._reply(asked, "udp")
            if reply is not None:
                self._datagrams.sendto(reply, source)

    def _serve_streams(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                asked = connection.recv(4096)[2:]
                reply = self._reply(asked, "tcp")
                if reply is not None:
                    connection.sendall(struct.pack(">H", len(reply)) + reply)
