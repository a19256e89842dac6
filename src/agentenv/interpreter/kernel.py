"""A Jupyter kernel: a process that runs code and tells what comes of it. Only this knows `jupyter_client`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from agentenv.interpreter import messages
from agentenv.interpreter.contexts import KernelDied
from agentenv.interpreter.messages import Message

log = logging.getLogger(__name__)

START_LIMIT_S = 900.0  # under software emulation, on a busy host, imports take minutes
# For ipykernel only: what makes its results those that clients expect.
_EXTENSION = "--IPKernelApp.extra_extensions=agentenv.interpreter.formatters"


def installed() -> list[str]:
    """The names of the kernels that there are."""
    return sorted(KernelSpecManager().find_kernel_specs())


class JupyterKernel:
    """A kernel that Jupyter knows by name; it is started again when it dies."""

    def __init__(self, name: str, cwd: str) -> None:
        self._name, self._cwd = name, cwd
        self._process: _Process | None = None
        self._running: _Running | None = None
        self._before: str | None = None
        self._revival: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, name: str, cwd: str) -> JupyterKernel:
        """Start a kernel in that directory and wait until it answers.

        Raises:
            RuntimeError: it does not answer in time, or ended.
        """
        kernel = cls(name, cwd)
        await kernel._begin()
        return kernel

    async def execute(
        self, code: str, *, silent: bool = False, counted: bool = True
    ) -> AsyncGenerator[Message, None]:
        """As the protocol says."""
        process = await self._alive()
        asked = process.ask(code, silent=silent, counted=counted and not silent)
        running = _Running(asked, self._before if silent else None)
        self._running, self._before = running, running.id
        try:
            while (message := await running.said.get()) is not None:
                yield message
                if messages.ends(message):
                    return
            raise KernelDied
        finally:
            if self._running is running:
                self._running = None

    async def interrupt(self) -> None:
        """As the protocol says."""
        await (await self._alive()).interrupt()

    async def restart(self) -> None:
        """As the protocol says."""
        await self._stop()
        await self._begin()

    async def end(self) -> None:
        """As the protocol says."""
        if self._revival is not None:
            self._revival.cancel()
        await self._stop()

    async def _alive(self) -> _Process:
        try:
            if self._revival is not None:
                await asyncio.shield(self._revival)
            if self._process is None:
                await self._begin()
        except RuntimeError as error:  # the next one who asks tries again
            raise KernelDied from error
        assert self._process is not None
        return self._process

    async def _begin(self) -> None:
        self._process = await _Process.start(self._name, self._cwd, self._heard, self._died)

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()
        if self._running is not None:
            self._running.said.put_nowait(None)

    def _heard(self, message: Message) -> None:
        """Keep what belongs to the execution that runs."""
        if self._running is not None and self._running.concerns(message):
            self._running.said.put_nowait(message)

    def _died(self) -> None:
        log.warning("the kernel %s ended by itself; starting another", self._name)
        self._revival = asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        try:
            await self.restart()
        except RuntimeError:
            log.exception("the kernel %s does not start again", self._name)
        finally:
            self._revival = None


@dataclass(frozen=True)
class _Running:
    """An execution, with what is said of it; a silent one also hears what comes late of the one before."""

    id: str
    before: str | None
    said: asyncio.Queue[Message | None] = field(default_factory=asyncio.Queue)

    def concerns(self, message: Message) -> bool:
        parent = message["parent_header"].get("msg_id")
        return parent == self.id or (
            parent is not None and parent == self.before and message["msg_type"] != "status"
        )


class _Process:
    """A kernel's process with its channels, from its start to its end."""

    def __init__(self, manager: AsyncKernelManager, heard: Callable[[Message], None]) -> None:
        self._manager, self._heard = manager, heard
        self._client: Any = manager.client()
        self._reader: asyncio.Task[None] | None = None
        self._watch: int | None = None

    @classmethod
    async def start(
        cls, name: str, cwd: str, heard: Callable[[Message], None], died: Callable[[], None]
    ) -> _Process:
        """Start it. `heard` is called with each message, `died` if it ends without being told."""
        manager = AsyncKernelManager(kernel_name=name)
        extra = [_EXTENSION] if name.startswith("python") else []
        await manager.start_kernel(cwd=cwd, extra_arguments=extra)
        process = cls(manager, heard)
        try:
            process._client.start_channels(hb=False)  # whether it lives is observed, not asked each second
            await process._client.wait_for_ready(timeout=START_LIMIT_S)
            process._observe(died)
        except BaseException:
            await process.end()
            raise
        process._reader = asyncio.create_task(process._read())
        return process

    def ask(self, code: str, *, silent: bool, counted: bool) -> str:
        """Let it run code; returns by which id its messages tell that they are of this."""
        asked = self._client.execute(code, silent=silent, store_history=counted, allow_stdin=False)
        return str(asked)

    async def interrupt(self) -> None:
        await self._manager.interrupt_kernel()

    async def end(self) -> None:
        self._forget()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._client.stop_channels()
        await self._manager.shutdown_kernel(now=True)

    async def _read(self) -> None:
        while True:
            try:
                self._heard(await self._client.get_iopub_msg())
            except Empty:  # woken for nothing
                continue

    def _observe(self, died: Callable[[], None]) -> None:
        """Learn of the end of the process at once, without looking again and again."""
        provisioner = self._manager.provisioner
        assert isinstance(provisioner, LocalProvisioner)
        assert provisioner.pid is not None

        def ended() -> None:
            self._forget()
            died()

        self._watch = os.pidfd_open(provisioner.pid)
        asyncio.get_running_loop().add_reader(self._watch, ended)

    def _forget(self) -> None:
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch)
            os.close(self._watch)
            self._watch = None
