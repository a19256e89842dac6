"""A shell in a sandbox, with this terminal: a new one, or one that was left."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from agentenv.cli.attached.door import Door
from agentenv.cli.attached.processes import Command, Ended, Following, follow, running, start
from agentenv.cli.attached.returning import Return, ShellGone
from agentenv.cli.attached.session import Left, Session
from agentenv.cli.attached.shells import Held, Shells
from agentenv.cli.attached.terminal import Terminal, locale_variables, size_of, tell
from agentenv.cli.attached.wire import Agent
from agentenv.errors import Conflict, NotFound

SHELL = ("/bin/bash", "-i", "-l")  # where an image has no bash, the agent takes what there is
PIPED = ("/bin/bash", "-l")
_TAG = "aenv-shell-"


@dataclass(frozen=True)
class Wanted:
    """How a shell is to be.

    Args:
        user: the account; the sandbox's default one if None.
        cwd: where a new one begins.
        env: variables of a new one.
        keys: that leave it.
        new: not one that was left.
        tag: that one.
    """

    user: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    keys: bytes = b""
    new: bool = False
    tag: str | None = None


def attach(door: Door, wanted: Wanted) -> Ended | Left:
    """Attach this terminal until the shell ends or is left; the sandbox lives on meanwhile.

    Without a terminal here the shell reads its commands from standard input.

    Raises:
        NotFound: the sandbox, or the shell that is wanted, is not there. Conflict: another is attached to it.
    """
    agent = door.agent(user=wanted.user)
    if not sys.stdin.isatty():
        return _piped(agent, wanted)
    held, begin, shown_before = _begin(door, agent, wanted)
    over = False
    try:
        with Terminal() as terminal:
            session = Session(
                agent,
                held.tag,
                in_terminal=True,
                terminal=terminal,
                keys=wanted.keys,
                keep=door.keep,
                shown_before=shown_before,
            )
            outcome = session.run(begin, Return(door, session, tell))
            over = isinstance(outcome, Ended)
            return outcome
    except (NotFound, ShellGone):
        over = True
        raise
    finally:
        held.let_go(forget=over)


def listed(door: Door) -> dict[str, int]:
    """Tags and pids of the shells that run in a sandbox."""
    with closing(door.agent().line()) as line:
        rows = running(line)
    return {row["tag"]: pid for pid, row in rows.items() if str(row["tag"] or "").startswith(_TAG)}


def _begin(door: Door, agent: Agent, wanted: Wanted) -> tuple[Held, Callable[[], Following], bool]:
    """Which shell it is to be, how it is begun, and whether a terminal had it before."""
    shells = Shells()
    if wanted.tag or not (wanted.new or wanted.user or wanted.cwd or wanted.env):
        there = listed(door)
        remembered = [tag for tag in shells.left(door.id) if tag in there]
        for tag in [wanted.tag] if wanted.tag else remembered:
            if tag not in there:
                raise NotFound(
                    f"sandbox {door.id} has no shell {tag}", remedy=f"aenv connect {door.id} --list"
                )
            if (held := shells.hold(door.id, tag)) is not None:
                return held, lambda tag=tag: follow(agent, tag), True
            if wanted.tag:
                raise Conflict(f"shell {tag} has another terminal", remedy="leave it there first")
    tag = _TAG + secrets.token_hex(4)
    held = shells.hold(door.id, tag) or Held(tag, None, None)
    command = Command(
        SHELL,
        cwd=wanted.cwd,
        env={**locale_variables(), **wanted.env},
        stdin=True,
        size=size_of(0),
        tag=tag,
    )
    return held, lambda: start(agent, command), False


def _piped(agent: Agent, wanted: Wanted) -> Ended | Left:
    tag = _TAG + secrets.token_hex(4)
    command = Command(PIPED, cwd=wanted.cwd, env=wanted.env, stdin=True, tag=tag)
    return Session(agent, tag).run(lambda: start(agent, command))
