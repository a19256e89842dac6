"""A command in a sandbox, with the pipes or the terminal that are here."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from agentenv.cli.attached.door import Door
from agentenv.cli.attached.processes import Begun, Command, Ended, Following, start
from agentenv.cli.attached.returning import Return
from agentenv.cli.attached.session import Left, Session
from agentenv.cli.attached.terminal import Terminal, locale_variables, size_of, tell
from agentenv.cli.attached.wire import Agent, DeadlinePassed, LineBroken
from agentenv.errors import AenvError, Conflict, GuestFault, InvalidRequest, NotFound, OutcomeUnknown

NO_PROGRAM, NOT_EXECUTABLE = 127, 126  # as shells have it


class NoSuchProgram(NotFound):
    """The sandbox has no such program."""

    exit_code = NO_PROGRAM


class NotExecutable(GuestFault):
    """What is there under that name cannot be run."""

    exit_code = NOT_EXECUTABLE


class TimedOut(OutcomeUnknown):
    """It was killed because its time was over."""

    exit_code = 9


@dataclass(frozen=True)
class Execution:
    """A command that is wanted.

    Args:
        words: the program and its arguments.
        user: as whom; the sandbox's default user if None.
        cwd: where; the sandbox's default directory if None.
        env: variables beside the sandbox's.
        stdin: whether it gets what comes from standard input.
        tty: whether it gets a terminal.
        timeout_s: after which it is killed.
        keys: that leave it, if it has this terminal.
    """

    words: Sequence[str]
    user: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bool = False
    tty: bool = False
    timeout_s: float | None = None
    keys: bytes = b""

    def begin(self, door: Door) -> int:
        """Start it and leave it alone; its pid."""
        following = self._start(door.agent(user=self.user), self._tag())
        try:
            for event in following:
                if isinstance(event, Begun):
                    return event.pid
        except AenvError as error:
            raise self._explained(error) from error
        finally:
            following.close()
        raise GuestFault("the command ended before it began")

    def run(self, door: Door) -> int:
        """Run it to its end, or until it is left; the status for this command.

        Raises:
            TimedOut: its time was over. NoSuchProgram, NotExecutable: it cannot be run.
            Conflict: the sandbox was paused meanwhile. NotFound: the sandbox ended.
        """
        agent, tag = door.agent(user=self.user), self._tag()
        here = self.tty and self.stdin and os.isatty(0)
        with ExitStack() as stack:
            terminal = stack.enter_context(Terminal()) if here else None
            session = Session(
                agent,
                tag,
                in_terminal=self.tty,
                terminal=terminal,
                given=0 if self.stdin else None,
                keys=self.keys,
                keep=door.keep if terminal else None,
            )
            again = Return(door, session, tell) if terminal else None
            try:
                outcome = session.run(lambda: self._start(agent, tag), again)
            except LineBroken as error:
                raise _why_broken(door, session.pid, error) from error
            except AenvError as error:
                raise self._explained(error) from error
        if isinstance(outcome, Ended):
            return outcome.code
        return _status_when_left(outcome)

    def _start(self, agent: Agent, tag: str) -> Following:
        env = {**(locale_variables() if self.tty else {}), **self.env}
        command = Command(
            self.words,
            cwd=self.cwd,
            env=env,
            stdin=self.stdin,
            size=size_of(0) if self.tty else None,
            tag=tag,
        )
        return start(agent, command, lifetime_s=self.timeout_s)

    def _explained(self, error: AenvError) -> AenvError:
        if isinstance(error, DeadlinePassed):
            return TimedOut(
                f"{self.words[0]} was killed: it took longer than {self.timeout_s:g} s",
                remedy="a longer --timeout, or --detach for what is to go on by itself",
            )
        if isinstance(error, InvalidRequest) and "error starting process" in error.message:
            kind = NoSuchProgram if "No such file" in error.message else NotExecutable
            return kind(error.message)
        return error

    def _tag(self) -> str:
        return "aenv-exec-" + secrets.token_hex(4)


def _why_broken(door: Door, pid: int, error: LineBroken) -> AenvError:
    """What became of the sandbox in which the command, whose connection broke, ran."""
    try:
        state = door.look()["state"]
    except NotFound:
        return NotFound(f"sandbox {door.id} ended while the command ran")
    except AenvError:
        return error
    if state == "paused":
        return Conflict(
            f"sandbox {door.id} was paused while the command ran (process {pid}, which goes on when that "
            "is resumed)",
            remedy=f"aenv resume {door.id}; what the command wrote meanwhile is not kept",
        )
    return LineBroken(
        f"{error.message}; the command (process {pid}) may go on in sandbox {door.id}",
        remedy=f"look with aenv exec {door.id} ps",
    )


def _status_when_left(outcome: Left) -> int:
    return 128 + outcome.by if outcome.by else 0
