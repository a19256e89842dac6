"""A worker process from outside (see `agentenv.image.worker`): started, listened to, and ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from agentenv import errors
from agentenv.errors import AenvError, HostFault
from agentenv.image.worker import MODULE, Job
from agentenv.progress import Progress, from_document

LINE_LIMIT = 1 << 20
STDERR_KEPT = 4000
# A worker that is called off removes what it has made; one that does not end in this time is killed.
END_LIMIT_S = 20.0


class Conversion:
    """One job in a process of its own. `run` once, then `close` once, which waits until it is gone."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._process: Process | None = None
        self._begun = False

    async def run(self, on_start: Callable[[int], None], progress: Progress) -> str:
        """Do the job; returns the digest of the content. The worker may have to clean up still.

        Args:
            on_start: told the process id before the job goes there.
            progress: told in a few words what is being done.

        Raises:
            AenvError: as the worker says. HostFault: it ended without saying anything.
        """
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", MODULE),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            limit=LINE_LIMIT,
            start_new_session=True,
        )
        assert process.stdin is not None
        on_start(process.pid)
        with suppress(ConnectionError):  # it ended at once, and says why on stderr
            process.stdin.write(json.dumps(self._job.document()).encode() + b"\n")
            await process.stdin.drain()
        return await self._listen(process, progress)

    async def _listen(self, process: Process, progress: Progress) -> str:
        assert process.stdout is not None and process.stderr is not None
        said = asyncio.create_task(process.stderr.read())
        try:
            while text := await process.stdout.readline():
                self._begun = True
                line = json.loads(text)
                if "progress" in line:
                    progress(from_document(line["progress"]))
                elif "done" in line:
                    return str(line["done"])
                else:
                    raise error_of(line)
            tail = (await said).decode(errors="replace")[-STDERR_KEPT:].strip()
            status = await process.wait()
            raise HostFault(
                f"the process that made {self._job.source} ended ({status}): {tail or 'silently'}"
            )
        finally:
            said.cancel()

    async def close(self) -> None:
        """Call the job off if it is not done, and wait until nothing of it runs."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        if self._begun:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_LIMIT_S)
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def error_of(line: dict[str, Any]) -> AenvError:
    """The error that a worker's line tells."""
    kind = getattr(errors, str(line.get("error")), HostFault)
    made: AenvError = kind(
        str(line.get("message")), remedy=line.get("remedy"), retry_after=line.get("retry_after")
    )
    return made
