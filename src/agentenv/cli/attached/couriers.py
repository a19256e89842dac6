"""The other end of a transfer: `parcel` as a program in a sandbox, and the stream to and from it."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGTERM

from agentenv.cli.attached.parcel import __file__ as PROGRAM
from agentenv.cli.attached.processes import Command, Ended, Hand, Wrote, follow, start
from agentenv.cli.attached.ways import Way
from agentenv.cli.attached.wire import Agent, LineBroken
from agentenv.errors import AenvError, GuestFault, NotFound
from agentenv.guestimage.mounted import INTERPRETER

SENT = 256 * 1024  # bytes that are gathered before they are sent
PIECES = 32  # of what came that wait to be read
LAST_WORDS_S = 10.0  # how long a broken stream waits for the program to say why


class Courier:
    """A program that packs or unpacks in a sandbox; it is ended with the block.

    Args:
        agent: of the sandbox, as the user whose files they are.
        arguments: of the program.
        tag: names this transfer: an earlier program of that name is ended.
        way: to the sandbox's ports, through which bytes go several times as fast; else through the agent.
        interpreter: the words before the program's text.
    """

    def __init__(
        self,
        agent: Agent,
        arguments: Sequence[str],
        tag: str,
        *,
        way: Way | None = None,
        interpreter: Sequence[str] = INTERPRETER,
    ) -> None:
        self._hand = Hand(agent, tag)
        self._waiting = bytearray()
        self._came = bytearray()
        self._pieces: queue.Queue[bytes] = queue.Queue(PIECES)
        self._over = False  # the end of what it writes was read
        self._said = bytearray()
        self._outcome: Ended | AenvError | None = None
        self._socket: socket.socket | None = None
        _end_earlier(agent, tag)
        words = (*interpreter, Path(PROGRAM).read_text(), "port" if way else "here", *arguments)
        self._following = start(agent, Command(words, stdin=way is None, tag=tag))
        self._thread = threading.Thread(target=self._follow, name="courier", daemon=True)
        self._thread.start()
        if way is not None:
            self._connect(way)

    def __enter__(self) -> Courier:
        return self

    def __exit__(self, *_error: object) -> None:
        """End the program, if it has not ended: it tidies up."""
        try:
            if self._socket is not None:
                self._socket.close()
            if self._outcome is None:
                self._hand.signal(SIGTERM, 0)
        except AenvError:
            pass  # it is out of reach
        finally:
            self._following.close()
            self._hand.close()
            while self._thread.is_alive():  # it may wait for room
                with suppress(queue.Empty):
                    self._pieces.get(timeout=0.05)

    def write(self, data: bytes) -> None:
        """Send, in larger pieces.

        Raises:
            LineBroken: the connection broke. GuestFault: the program ended, for the reason told.
        """
        self._waiting += data
        if len(self._waiting) >= SENT:
            self.flush()

    def flush(self) -> None:
        """Send what waits."""
        data, self._waiting = bytes(self._waiting), bytearray()
        if data:
            self.send(data)

    def send(self, data: bytes) -> None:
        """Send at once; by one thread, which need not be the one that receives."""
        try:
            if self._socket is not None:
                self._socket.sendall(data)
            else:
                self._hand.write(data)
        except LineBroken:
            raise
        except (OSError, GuestFault, NotFound):  # it reads no more, or the way to it broke
            raise self._fault() from None

    def end_input(self) -> None:
        """Nothing more will be sent."""
        self.flush()
        try:
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_WR)
            else:
                self._hand.end_input()
        except (OSError, AenvError):
            pass  # it has ended, or its events tell that the connection broke

    def receive(self) -> bytes:
        """What the program wrote; nothing at its end."""
        if self._socket is None:
            data = b"" if self._over else self._pieces.get()
        else:
            try:
                data = self._socket.recv(SENT)
            except OSError:
                data = b""
        self._over = not data
        return data

    def answer(self) -> int:
        """The number with which the program answers to what was written."""
        self.flush()
        while b"\n" not in self._came:
            self._receive_more()
        line, _, rest = bytes(self._came).partition(b"\n")
        self._came = bytearray(rest)
        return int(line)

    def read(self, size: int) -> bytes:
        """So many bytes of what the program writes."""
        while len(self._came) < size:
            self._receive_more()
        data = bytes(self._came[:size])
        del self._came[:size]
        return data

    def finish(self) -> list[str]:
        """Send what is left and wait for the program's end; what it told, a line each.

        Raises:
            LineBroken: its end is not known.
        """
        self.flush()
        while self.receive():
            pass
        self._thread.join()
        if isinstance(self._outcome, AenvError):
            raise self._outcome
        return self._lines()

    @property
    def failed(self) -> bool:
        """Whether the program ended with another status than 0."""
        return isinstance(self._outcome, Ended) and self._outcome.code != 0

    def _connect(self, way: Way) -> None:
        try:
            port, _, secret = self._line().partition(b" ")
            self._socket = way.connect(int(port))
            self._socket.sendall(secret)
        except BaseException:
            self.__exit__()
            raise

    def _line(self) -> bytes:
        while b"\n" not in self._came:
            self._receive_more()
        line = bytes(self._came).rstrip(b"\n")
        self._came.clear()
        return line

    def _receive_more(self) -> None:
        if not (data := self.receive()):
            raise self._fault()
        self._came += data

    def _fault(self) -> AenvError:
        """Why the program is no longer there."""
        self._thread.join(LAST_WORDS_S)
        if isinstance(self._outcome, AenvError):
            return self._outcome
        if self._outcome is None:
            return LineBroken("the connection to a port of the sandbox broke")
        return GuestFault("; ".join(self._lines()) or "the program in the sandbox ended without a word")

    def _lines(self) -> list[str]:
        return self._said.decode(errors="replace").splitlines()

    def _follow(self) -> None:
        try:
            for event in self._following:
                if isinstance(event, Ended):
                    self._outcome = event
                elif isinstance(event, Wrote) and event.stream == "stderr":
                    self._said += event.data
                elif isinstance(event, Wrote):
                    self._pieces.put(event.data)
        except AenvError as error:
            self._outcome = error
        self._pieces.put(b"")


def _end_earlier(agent: Agent, tag: str) -> None:
    """End a program of this name, which an earlier command of the same words left, and wait until it has."""
    hand = Hand(agent, tag)
    try:
        hand.signal(SIGTERM, 0)
        for _ in follow(agent, tag):
            pass
    except NotFound:
        pass
    finally:
        hand.close()
