"""The other end of a transfer: `parcel` as a program in a sandbox, and the stream to and from it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from agentenv.cli.attached.parcel import __file__ as PROGRAM
from agentenv.cli.attached.processes import Command, Ended, Hand, Wrote, follow, start
from agentenv.cli.attached.wire import Agent, LineBroken
from agentenv.errors import AenvError, GuestFault, NotFound
from agentenv.guestimage.mounted import INTERPRETER

SENT = 1 << 20  # bytes that are sent at a time
PIECES = 32  # of what came that wait to be read


class Courier:
    """A program that packs or unpacks in a sandbox; it is ended with the block.

    Args:
        agent: of the sandbox, as the user whose files they are.
        arguments: of the program.
        tag: names this transfer: an earlier one of that name, which nobody feeds any more, is ended.
        interpreter: the words before the program's text.
        on_answer: takes what the program writes, by another thread; else it is to be `read`.
    """

    def __init__(
        self,
        agent: Agent,
        arguments: Sequence[str],
        tag: str,
        *,
        interpreter: Sequence[str] = INTERPRETER,
        on_answer: Callable[[bytes], None] | None = None,
    ) -> None:
        self._hand = Hand(agent, tag)
        self._waiting = bytearray()
        self._came = bytearray()
        self._pieces: queue.Queue[bytes] = queue.Queue(0 if on_answer else PIECES)
        self._on_answer = on_answer
        self._over = False  # the end of what it writes was read
        self._said = bytearray()
        self._outcome: Ended | AenvError | None = None
        _end_earlier(agent, tag, packs=arguments[0] == "pack")
        words = (*interpreter, Path(PROGRAM).read_text(), *arguments)
        self._following = start(agent, Command(words, stdin=True, tag=tag))
        self._thread = threading.Thread(target=self._follow, name="courier", daemon=True)
        self._thread.start()

    def __enter__(self) -> Courier:
        return self

    def __exit__(self, *_error: object) -> None:
        """End the program, if it has not ended: it sees the end of its input and tidies up."""
        try:
            if self._outcome is None:
                self._hand.end_input()
        except AenvError:
            pass  # it has ended, or is out of reach
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
        """Send at once; of one thread, which need not be the one that reads."""
        try:
            self._hand.write(data)
        except LineBroken:
            raise
        except (GuestFault, NotFound):  # it reads no more
            raise self._fault() from None

    def answer(self) -> int:
        """The number with which the program answers to what was written."""
        self.flush()
        while b"\n" not in self._came:
            self._await_more()
        line, _, rest = bytes(self._came).partition(b"\n")
        self._came = bytearray(rest)
        return int(line)

    def read(self, size: int) -> bytes:
        """So many bytes of what the program writes."""
        while len(self._came) < size:
            self._await_more()
        data = bytes(self._came[:size])
        del self._came[:size]
        return data

    def read_some(self) -> bytes:
        """What the program wrote; nothing at its end."""
        data = b"" if self._over else self._pieces.get()
        self._over = not data
        return data

    @property
    def idle(self) -> bool:
        """Whether there is nothing yet to be read."""
        return self._pieces.empty()

    def finish(self) -> list[str]:
        """Send what is left and wait for the program's end; what it told, a line each.

        Raises:
            GuestFault: it failed, for the reason told.
        """
        self.flush()
        if self._on_answer is None:
            while self.read_some():
                pass
        self._thread.join()
        if isinstance(self._outcome, AenvError):
            raise self._outcome
        return self._lines()

    @property
    def failed(self) -> bool:
        """Whether the program ended with another status than 0."""
        return isinstance(self._outcome, Ended) and self._outcome.code != 0

    def _await_more(self) -> None:
        if not (data := self.read_some()):
            raise self._fault()
        self._came += data

    def _fault(self) -> AenvError:
        """Why the program is no longer there."""
        self._thread.join()
        if isinstance(self._outcome, AenvError):
            return self._outcome
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
                    (self._on_answer or self._pieces.put)(event.data)
        except AenvError as error:
            self._outcome = error
        self._pieces.put(b"")


def _end_earlier(agent: Agent, tag: str, *, packs: bool) -> None:
    """End a program of this name whose client has gone, and wait until it has.

    One that packs would go on to its end, unheard; one that unpacks sees its input end, and tidies up.
    """
    hand = Hand(agent, tag)
    try:
        if packs:
            hand.signal(9, 0)
        else:
            hand.end_input()
        for _ in follow(agent, tag):
            pass
    except NotFound:
        pass
    finally:
        hand.close()
