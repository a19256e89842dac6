"""How each instruction is carried out in a guest."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from agentenv.building import programs
from agentenv.building.logs import Feed, Lines
from agentenv.building.packing import pack
from agentenv.building.plan import PATH, Context, Planned
from agentenv.errors import AenvError, GuestFault, InvalidRequest
from agentenv.guestimage.mounted import MOUNT_POINT
from agentenv.sandbox.guest import Command, CommandFailed, Output

BUSYBOX = f"{MOUNT_POINT}/bin/busybox"
# What a step leaves running would go on in every sandbox; a Dockerfile's ends with its step.
_END_LEFTOVERS = (BUSYBOX, "sh", "-c", "kill -9 -1")
_ON_DISK = "/.agentenv-copy"
_IN_MEMORY = "/run/agentenv-copy"
# Up to this part of the machine's memory files come through it, and do not swell the disk's layer.
_MEMORY_PART = 8


T = TypeVar("T")


class StepFailed(AenvError):
    """A build that failed, and in which step: `base`, `finalize`, or a number from 1 on."""

    code = "build_failed"

    def __init__(self, step: str, message: str) -> None:
        super().__init__(message)
        self.step = step


class Works(Protocol):
    """A guest; see sandbox.guest.Guest."""

    async def run(self, command: Command, output: Output, *, limit_s: float = ...) -> None: ...
    async def put(self, path: str, file: BinaryIO, size: int) -> None: ...
    async def fetch(self, path: str, take: Callable[[AsyncIterator[bytes]], Coroutine[Any, Any, T]]) -> T: ...


class Steps:
    """Carries steps out.

    Args:
        scratch: gives a directory for nameless files.
    """

    def __init__(self, scratch: Callable[[], Path]) -> None:
        self._scratch = scratch

    async def carry_out(
        self,
        planned: Planned,
        guest: Works,
        feed: Feed,
        files: Callable[[Planned], Path],
        *,
        memory_mib: int,
        disk_mib: int,
    ) -> None:
        """Carry one step out. `files` gives the archive that a COPY takes from, or the stream that was
        collected where it copies from.

        Raises:
            StepFailed: it failed; the message is what its client is shown.
        """
        name = str(planned.number)
        try:
            if planned.step.type == "RUN":
                await self._run(planned, guest, feed)
            elif planned.step.type == "COPY":
                await self._copy(planned, guest, feed, files(planned), memory_mib, disk_mib)
            elif planned.step.type == "WORKDIR":
                await self._workdir(planned, guest, feed)
            elif planned.step.type == "USER":
                await self._user(planned, guest, feed)
        except CommandFailed as error:
            raise StepFailed(name, error.message) from error
        except AenvError as error:
            raise StepFailed(name, str(error)) from error

    async def _run(self, planned: Planned, guest: Works, feed: Feed) -> None:
        text, *given = planned.step.args
        context = planned.before
        user = (given[0] if given else "") or context.actor
        output = following(feed, str(planned.number))
        try:
            await guest.run(shell(text, user, context, login=planned.step.login), output.feed)
        except CommandFailed as error:
            raise CommandFailed(f"failed to run command '{text}': {error.message}") from error
        finally:
            output.end()
        await end_leftovers(guest)

    async def _copy(
        self, planned: Planned, guest: Works, feed: Feed, archive: Path, memory_mib: int, disk_mib: int
    ) -> None:
        source, destination, owner, mode = (*planned.step.args, "", "")[:4]
        context = planned.before
        with tempfile.TemporaryFile(dir=self._scratch()) as stream:
            if planned.step.source is None:
                size = await asyncio.to_thread(pack, archive, source, stream, limit_bytes=disk_mib << 20)
                await asyncio.to_thread(stream.seek, 0)
                path = await _handed_over(guest, stream, size, memory_mib)
            else:
                with archive.open("rb") as ready:
                    path = await _handed_over(guest, ready, archive.stat().st_size, memory_mib)
        workdir = context.directory or await home_of(guest, context.actor)
        owner = owner or ("=" if planned.step.archive_owners else context.actor)
        arguments = (path, destination, workdir, owner, mode)
        await program(guest, "failed to copy files", feed, str(planned.number), "place", *arguments)

    async def _workdir(self, planned: Planned, guest: Works, feed: Feed) -> None:
        arguments = (planned.after.workdir, planned.before.actor)
        await program(guest, "failed to create workdir", feed, str(planned.number), "workdir", *arguments)

    async def _user(self, planned: Planned, guest: Works, feed: Feed) -> None:
        name, *more = planned.step.args
        arguments = (name.partition(":")[0], *(["sudo"] if "true" in more else []))
        await program(guest, "failed to create user", feed, str(planned.number), "account", *arguments)


async def _handed_over(guest: Works, stream: BinaryIO, size: int, memory_mib: int) -> str:
    path = _IN_MEMORY if size <= (memory_mib << 20) // _MEMORY_PART else _ON_DISK
    await guest.put(path, stream, size)
    return path


async def program(guest: Works, failure: str, feed: Feed, step: str, name: str, *arguments: str) -> None:
    """Run one of our programs in a guest.

    Raises:
        CommandFailed: it failed; the message has what it said.
    """
    said: list[str] = []
    lines = Lines(lambda _stream, line: said.append(line))
    try:
        await guest.run(Command(programs.argv(name, *arguments), "root", "/"), lines.feed)
    except CommandFailed as error:
        lines.end()
        for line in said:
            feed.tell("error", line, step)
        raise CommandFailed(f"{failure}: {said[-1] if said else error.message}") from error


async def end_leftovers(guest: Works) -> None:
    """End whatever still runs besides the agent."""
    try:
        await guest.run(Command(_END_LEFTOVERS, "root", "/"), lambda _stream, _data: None)
    except CommandFailed as error:
        if "killed" not in error.message and "exit status" not in error.message:
            raise GuestFault(f"what a step left running cannot be ended: {error.message}") from error


async def home_of(guest: Works, user: str) -> str:
    """The home directory of a user.

    Raises:
        InvalidRequest: it is none that could be a place.
    """
    found = bytearray()
    words = (BUSYBOX, "sh", "-c", 'printf %s "$HOME"')
    await guest.run(Command(words, user, "/"), lambda _stream, data: found.extend(data))
    home = found.decode(errors="replace")
    if not home.startswith("/"):
        raise InvalidRequest(f"the home directory of {user} is {home!r}")
    return home


def shell(text: str, user: str, context: Context, *, login: bool = True) -> Command:
    """A command's text with the variables of a context. The login shell's start-up files may set PATH
    themselves, so one that was chosen is put in after them."""
    variables = context.variables
    if not login:
        return Command(("/bin/sh", "-c", text), user, context.directory or None, variables)
    if path := variables.get("PATH"):
        path = f"{path}:{PATH}"
        variables = {**variables, "PATH": path}
        text = f"export PATH={shlex.quote(path)}\n{text}"
    return Command.shell(text, user, context.directory or None, variables)


def following(feed: Feed, step: str, level: str = "info", what: str = "") -> Lines:
    """What takes a command's output and tells it line by line."""
    prefix = f"[{what}] " if what else ""
    return Lines(lambda stream, line: feed.tell(level, f"{prefix}[{stream}]: {line}", step))
