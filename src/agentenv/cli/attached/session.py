"""A process in a sandbox that has this terminal, or these pipes, until it ends or is left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from agentenv.cli.attached.feeding import feed_keys, feed_pipe
from agentenv.cli.attached.processes import Begun, Ended, Following, Hand, Wrote
from agentenv.cli.attached.signals import caught
from agentenv.cli.attached.terminal import DetachKeys, Terminal, write_all
from agentenv.cli.attached.wire import Agent, LineBroken
from agentenv.errors import AenvError

PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
OF_TERMINALS = (signal.SIGWINCH, signal.SIGCONT)
LEAVING = (signal.SIGTERM, signal.SIGHUP)
KILLING = 3  # interrupts, after which a command that ignores them is killed


@dataclass(frozen=True)
class Left:
    """It goes on without this terminal: left by the keys, or by a signal (its number)."""

    by: int = 0


class Session:
    """One process and what it is attached to.

    Args:
        agent: of its sandbox.
        tag: of the process.
        in_terminal: whether the process has a terminal in the sandbox.
        terminal: the one here that is its, raw already; None for pipes.
        given: the descriptor that its input comes from, or None.
        keys: that leave it.
        keep: called now and then while it lasts.
        shown_before: another terminal had it, so that it has to be drawn anew.
    """

    def __init__(
        self,
        agent: Agent,
        tag: str,
        *,
        in_terminal: bool = False,
        terminal: Terminal | None = None,
        given: int | None = 0,
        keys: bytes = b"",
        keep: Callable[[], None] | None = None,
        shown_before: bool = False,
    ) -> None:
        self.agent = agent
        self.tag = tag
        self.pid = 0
        self.key = False
        self._in_terminal = in_terminal
        self._terminal = terminal
        self._given = given
        self._keys = keys
        self._keep = keep
        self._shown_before = shown_before
        self._interrupts = 0
        self._left: Left | None = None
        self._waiting = False
        self._poked = threading.Event()
        self._following: Following | None = None
        self._control = self._hand()  # of the thread that signals come to

    def run(
        self, begin: Callable[[], Following], again: Callable[[], Following | None] | None = None
    ) -> Ended | Left:
        """Attach until the process ends or is left.

        Args:
            begin: starts it, or follows it.
            again: asked when the connection broke, for another one; it may `wait`, and gives None if it
                was left meanwhile. Without it a break is an error.

        Raises:
            LineBroken: the connection broke, and there is no `again`.
            AenvError: of `begin` and `again`.
        """
        with caught(PASSED + (OF_TERMINALS if self._terminal else ()), self._signalled, self._keep):
            following: Following | None = begin()
            while following is not None and self._left is None:
                self._following = following
                try:
                    return self._follow(following)
                except LineBroken:
                    if again is None and self._left is None:
                        raise
                if again is not None and self._left is None:
                    following = again()
        return self._left or Left()

    def wait(self, seconds: float) -> bool:
        """Wait for a key, a `poke`, or so long; whether it was one of the first two. Keys are not sent; `key`
        says whether there was one."""
        self.key = False
        self._waiting = True
        try:
            return self._poked.wait(seconds)
        finally:
            self._waiting = False
            self._poked.clear()

    def poke(self) -> None:
        """End a `wait`."""
        self._poked.set()

    @property
    def left(self) -> bool:
        return self._left is not None

    def leave(self, by: int = 0) -> None:
        """Let the process go on without this terminal."""
        self._left = self._left or Left(by)
        self._poked.set()
        if self._following is not None:
            self._following.close()

    def _follow(self, following: Following) -> Ended:
        for event in following:
            if isinstance(event, Wrote):
                self._show(event)
            elif isinstance(event, Begun):
                self._begun(event.pid)
            else:
                return event
            if self._left is not None:  # before there was anything to be closed
                break
        raise LineBroken("the events of the process ended before it did")

    def _show(self, event: Wrote) -> None:
        if self._terminal is not None:
            self._terminal.show(event.data)
            return
        try:
            write_all(2 if event.stream == "stderr" else 1, event.data)
        except BrokenPipeError:  # who read it has gone: to the process it is the same
            self._hand().signal(signal.SIGPIPE, self.pid)
            raise

    def _begun(self, pid: int) -> None:
        again, self.pid = self.pid != 0, pid
        if self._terminal is not None:
            self._redraw(anew=again or self._shown_before)
        if again or self._given is None:
            return
        hand = self._hand()
        if self._terminal is None:
            feed_pipe(hand, self._given)
        else:
            feed_keys(hand, self._given, DetachKeys(self._keys), self._typed, self.leave)

    def _redraw(self, *, anew: bool) -> None:
        """Give its terminal this one's size; another one before, so that it is drawn anew."""
        assert self._terminal is not None
        columns, rows = self._terminal.size()
        hand = self._hand()
        try:
            if anew:
                hand.resize((columns, rows + 1))
            hand.resize((columns, rows))
        except AenvError:
            pass  # it has ended, or the connection broke: its events tell
        finally:
            hand.close()

    def _typed(self, data: bytes) -> bytes:
        if not self._waiting:
            return data
        if b"\x03" in data:
            self.leave()
        self.key = True
        self._poked.set()
        return b""

    def _signalled(self, number: int) -> None:
        """A signal came to this process."""
        try:
            if number in OF_TERMINALS:
                assert self._terminal is not None
                if number == signal.SIGCONT:
                    self._terminal.take()
                self._control.resize(self._terminal.size())
            elif number in LEAVING and self._in_terminal:
                self.leave(number)
            elif self.pid:
                self._interrupts += number == signal.SIGINT
                self._control.signal(signal.SIGKILL if self._interrupts >= KILLING else number, self.pid)
            elif number in (*LEAVING, signal.SIGINT):
                self.leave(number)
        except AenvError:
            pass  # it has ended, or the connection broke: its events tell

    def _hand(self) -> Hand:
        return Hand(self.agent, self.tag, terminal=self._in_terminal)
