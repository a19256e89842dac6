"""A template's start command: begun, and waited for until what it starts is ready.

The rules are those of E2B's builds: the ready command is tried until it succeeds; without one, a start
command is given 20 seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from agentenv.errors import GuestFault
from agentenv.sandbox.guest import Command, CommandFailed, Output
from agentenv.snapshot.records import GuestSettings, Start

DEFAULT_READY = "sleep 20"
READY_LIMIT_S = 600.0
# The first tries come soon: most services are up within a second.
RETRY_S = (0.25, 2.0)
RETRY_GROWTH = 1.5
SYSTEMD_LIMIT_S = 300.0
# What `systemctl is-system-running` says once nothing more is to be started (systemctl(1)).
SYSTEMD_UP = frozenset(("running", "degraded"))

Tell = Callable[[str, str], None]
"""Told a level (`debug`, `info`, `warn`, `error`) and a message."""


OutputOf = Callable[[str], Output]
"""Makes, for `start` and `ready`, what takes their output."""


class Runs(Protocol):
    """Where commands run; see guest.Guest."""

    async def run(self, command: Command, output: Output, *, limit_s: float = ...) -> None: ...


async def start(
    guest: Runs,
    wanted: Start,
    tell: Tell,
    output: OutputOf,
    *,
    limit_s: float = READY_LIMIT_S,
) -> None:
    """Begin the start command, and return when the ready command has succeeded. What was started goes on.

    Args:
        guest: where.
        wanted: the commands, and what they run with.
        tell: told what is done.
        output: what takes their output.
        limit_s: seconds until it must be ready.

    Raises:
        GuestFault: it did not become ready in time, or the start command failed before that.
    """
    settings = wanted.settings
    ready = wanted.ready or (DEFAULT_READY if wanted.command else "")
    started: asyncio.Task[None] | None = None
    if wanted.command:
        tell("info", f"Running start command: {wanted.command}")
        command = _command(wanted.command, settings)
        started = asyncio.create_task(guest.run(command, output("start"), limit_s=0), name="start command")
    try:
        tell("info", f"Waiting for template to be ready: {ready}" if ready else "No ready command")
        await _until_ready(guest, ready, settings, tell, output, started, limit_s)
    finally:
        if started is not None:  # it is followed no longer, and runs on
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)
    tell("info", "Template is ready")


async def until_systemd(guest: Runs, tell: Tell) -> None:
    """Return when the guest's systemd has started what it is to start; some of it may have failed.

    Raises:
        GuestFault: it took longer than five minutes.
    """
    limit_s = SYSTEMD_LIMIT_S
    command = Command(("systemctl", "is-system-running", "--wait"), "root", "/")
    said = bytearray()
    pause, longest = RETRY_S
    try:
        async with asyncio.timeout(limit_s):
            while True:
                said.clear()
                with contextlib.suppress(CommandFailed):  # its status is 1 for `degraded` as well
                    await guest.run(command, lambda stream, data: said.extend(data), limit_s=limit_s)
                if (state := said.decode(errors="replace").strip()) in SYSTEMD_UP:
                    tell("info", f"systemd is up: {state}")
                    return
                await asyncio.sleep(pause)  # until it listens there is nothing that could be waited for
                pause = min(pause * RETRY_GROWTH, longest)
    except TimeoutError:
        state = said.decode(errors="replace").strip() or "silent"
        raise GuestFault(
            f"systemd is still {state} after {limit_s:g} s", remedy="mask the units that do not come up"
        ) from None


async def _until_ready(
    guest: Runs,
    ready: str,
    settings: GuestSettings,
    tell: Tell,
    output: OutputOf,
    started: asyncio.Task[None] | None,
    limit_s: float,
) -> None:
    waiting = asyncio.create_task(_tries(guest, ready, settings, tell, output), name="ready command")
    try:
        async with asyncio.timeout(limit_s):
            if started is not None:
                await asyncio.wait({waiting, started}, return_when=asyncio.FIRST_COMPLETED)
                if started.done() and (error := started.exception()) is not None:
                    raise GuestFault(f"start command failed: {error}") from error
            await waiting
    except TimeoutError:
        raise GuestFault(f"ready command timed out after {limit_s:g} s: {ready}") from None
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _tries(guest: Runs, ready: str, settings: GuestSettings, tell: Tell, output: OutputOf) -> None:
    pause, longest = RETRY_S
    while ready:
        try:
            await guest.run(_command(ready, settings), output("ready"))
            return
        except CommandFailed as error:
            tell("debug", f"Template is not ready: {error}")
        await asyncio.sleep(pause)  # nothing tells when what was started has come up
        pause = min(pause * RETRY_GROWTH, longest)


def _command(text: str, settings: GuestSettings) -> Command:
    return Command.shell(text, settings.default_user, settings.default_workdir, settings.env)
