"""Coming back to a process in a terminal after its sandbox was paused, or the way to it was cut."""

from __future__ import annotations

from collections.abc import Callable

from agentenv.cli.api import Unreachable
from agentenv.cli.attached.door import Door, Watch
from agentenv.cli.attached.processes import Following, follow
from agentenv.cli.attached.session import Session
from agentenv.cli.attached.wire import LineBroken
from agentenv.errors import AenvError, CapacityExceeded, Expired, NotFound, OutcomeUnknown

AGAIN_S = 1.0  # between two attempts at something that says nothing when it changes
PAUSED_S = 30.0  # between two looks at a paused sandbox, whose events are followed


class ShellGone(Expired):
    """The sandbox goes on, and what was attached to is not there any more."""


class Return:
    """Finds the process again; for `Session.run`.

    Args:
        door: to its sandbox.
        session: that is attached to it.
        tell: takes what the person at the terminal is to know.
    """

    def __init__(self, door: Door, session: Session, tell: Callable[[str], None]) -> None:
        self._door = door
        self._session = session
        self._tell = tell
        self._told = ""
        self._watch: Watch | None = None

    def __call__(self) -> Following | None:
        """The process's events from now on; None if it was left meanwhile.

        Raises:
            NotFound: the sandbox has ended.
            ShellGone: the process has.
        """
        self._told = ""
        try:
            while not self._session.left:
                found = self._attempt()
                if found is not None:
                    if self._told:
                        self._tell("attached again")
                    return found
        finally:
            self._unwatch()
        return None

    def _attempt(self) -> Following | None:
        """Look once and do the next thing; None if that was not enough."""
        try:
            state = self._door.look()["state"]
            if state == "paused":
                self._while_paused()
                return None
            return follow(self._session.agent, self._session.tag)
        except LineBroken:  # between two states
            self._session.wait(AGAIN_S)
        except (Unreachable, OutcomeUnknown, CapacityExceeded) as error:
            self._say_once(f"{error.message}: trying again (Ctrl-C leaves)")
            self._session.wait(AGAIN_S)
        except NotFound as error:
            if self._exists():
                raise ShellGone(
                    "the shell is gone: its sandbox went back, or was started from its disk"
                ) from None
            raise NotFound(f"sandbox {self._door.id} has ended") from error
        return None

    def _while_paused(self) -> None:
        self._say_once("the sandbox is paused; any key resumes it (Ctrl-C leaves)")
        if self._watch is None:
            self._watch = self._door.watch(self._session.poke)
            return  # it may have been resumed before anybody watched
        if self._session.wait(PAUSED_S):
            self._unwatch()
            if self._session.key:
                self._door.wake()

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _exists(self) -> bool:
        try:
            self._door.look()
        except NotFound:
            return False
        except AenvError:
            return True
        return True

    def _say_once(self, message: str) -> None:
        if message != self._told:
            self._told = message
            self._tell(message)
