"""Runs the host's programs for a build: nothing of them outlives a cancelled call or this process."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

KEPT_LINES = 200

Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `status` is None where there is no such program."""

    status: int | None
    stderr: str


async def run(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Outcome:
    """Run a program to its end; its output goes line by line to `on_line`, the last lines are kept.

    When the call is cancelled, the program and its children are killed and reaped first.
    """
    kept: deque[str] = deque(maxlen=KEPT_LINES)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**(environment or os.environ), "LC_ALL": "C.UTF-8"},
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except FileNotFoundError:
        return Outcome(None, f"{command[0]}: not found")
    try:
        await _read_lines(process, kept, on_line)
        status = await process.wait()
    except BaseException:
        await _kill(process)
        raise
    return Outcome(status, "\n".join(kept))


async def in_thread(work: Callable[[], Result], stop: Callable[[], None] | None = None) -> Result:
    """Do blocking work in a thread. A cancelled call ends only when the work has: nobody may remove
    what it works on before. `stop` is called first, to ask it to end early.
    """
    task = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # seen, so that asyncio does not report it
        raise


async def _read_lines(process: Process, kept: deque[str], on_line: Callable[[str], None] | None) -> None:
    assert process.stdout is not None
    rest = b""
    while data := await process.stdout.read(65536):
        *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
        rest = rest[-65536:]
        for line in lines:
            text = line.decode(errors="replace")
            kept.append(text)
            if on_line is not None:
                on_line(text)
    if rest:
        kept.append(rest.decode(errors="replace"))


async def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.shield(process.wait())
