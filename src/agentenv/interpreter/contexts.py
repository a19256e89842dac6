"""Contexts: kernels by id, one by default for each language, and code running in them."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from agentenv.interpreter import languages, messages
from agentenv.interpreter.environment import Environment
from agentenv.interpreter.messages import Line, Message

log = logging.getLogger(__name__)

_REHEARSED = {"AENV_REHEARSAL": ""}  # a variable that is set and unset
_LATE = ("stream", "display_data", "execute_result")
INTERRUPT_LIMIT_S = 10.0  # for code to give in to an interrupt, before its kernel is restarted


class KernelDied(Exception):
    """A kernel's process ended while it was to run code; another one takes its place."""


class Kernel(Protocol):
    """A process that runs code and tells what comes of it, one execution at a time."""

    def execute(
        self, code: str, *, silent: bool = False, counted: bool = True
    ) -> AsyncGenerator[Message, None]:
        """The messages that come of running `code`, to the one that says that the kernel is idle again.

        A silent execution has no number and no result; it tells also what came late of the one before. One
        that is not counted is like any other and leaves no history.

        Raises:
            KernelDied: its process ended.
        """

    async def interrupt(self) -> None:
        """Stop what runs, as Ctrl-C does."""

    async def restart(self) -> None:
        """Another process in the place of this one, knowing nothing."""

    async def end(self) -> None:
        """End the process."""


Starts = Callable[[str, str], Awaitable[Kernel]]
"""Starts the kernel of that name in that directory; RuntimeError or OSError where it cannot."""


class NoSuchContext(Exception):
    """There is no context of that id."""


class CannotStart(Exception):
    """There is no kernel for the language, or it does not start."""


@dataclass
class Context:
    """A kernel with a language and the directory that it started in."""

    id: str
    language: str
    cwd: str
    kernel: Kernel
    free: asyncio.Lock = field(default_factory=asyncio.Lock)
    set_before: dict[str, str] = field(default_factory=dict)
    prepared: bool = False  # started for whoever comes, and nobody's code has run in it

    async def execute(
        self, code: str, given: Mapping[str, str], common: Mapping[str, str]
    ) -> AsyncGenerator[Line, None]:
        """Run code and yield the lines for the client; one at a time, in the order of asking.

        Args:
            code: in the context's language.
            given: variables for this execution alone.
            common: variables of the sandbox.

        Whoever stops reading stops the code: its kernel is interrupted, and restarted if it does not give in.
        """
        await self.free.acquire()
        finished = False
        try:
            await self._make_own()
            await self._assign({**self._changes(common), **given})
            async with aclosing(self._lines(code)) as lines:
                async for line in lines:
                    yield line
            finished = True
        finally:
            if finished:
                await self._restore(given, common)
                self.free.release()
            else:
                # Not here: this may be a cancelled task, which cannot wait any more.
                task = asyncio.create_task(self._stop(given, common))
                _pending.add(task)
                task.add_done_callback(_pending.discard)

    async def prepare(self) -> None:
        """Have the kernel do what takes long, before there is anybody whose code it runs."""
        self.prepared = True
        async with self.free:
            await self._run_silently(languages.of(self.language).prepare)

    async def rehearse(self) -> AsyncGenerator[Line, None]:
        """All that an execution does, so that the first one is quick when it comes; it leaves no trace."""
        async with self.free:
            await self._assign(_REHEARSED)
            async with aclosing(self._lines(languages.of(self.language).rehearse, counted=False)) as lines:
                async for line in lines:
                    yield line
            await self._restore(_REHEARSED, {})

    async def restart(self) -> None:
        """Forget all that was run."""
        self.set_before = {}
        await self.kernel.restart()

    async def _lines(self, code: str, *, counted: bool = True) -> AsyncGenerator[Line, None]:
        try:
            async with aclosing(self.kernel.execute(code, counted=counted)) as said:
                async for message in said:
                    line = messages.line_of(message)
                    if line is not None:
                        yield line
            if languages.of(self.language).late:
                async for line in self._late_output():
                    yield line
        except KernelDied:
            self.set_before = {}
            yield messages.error("ContextRestarting", "The kernel ended and was started again")

    async def _late_output(self) -> AsyncGenerator[Line, None]:
        """What the kernel tells beside a nothing that is run after the code."""
        async with aclosing(self.kernel.execute("", silent=True)) as said:
            async for message in said:
                if message["msg_type"] in _LATE and (line := messages.line_of(message)) is not None:
                    yield line

    def _changes(self, common: Mapping[str, str]) -> dict[str, str | None]:
        """What to set so that this sandbox's variables hold, and not those of the one it was forked from."""
        if self.set_before == common:
            return {}
        gone = dict.fromkeys(self.set_before.keys() - common.keys())
        self.set_before = dict(common)
        return {**gone, **common}

    async def _restore(self, given: Mapping[str, str], common: Mapping[str, str]) -> None:
        await self._assign({name: common.get(name) for name in given})

    async def _assign(self, variables: Mapping[str, str | None]) -> None:
        await self._run_silently(languages.of(self.language).assign(variables) if variables else "")

    async def _make_own(self) -> None:
        if self.prepared:
            self.prepared = False
            await self._run_silently(languages.of(self.language).inherit)

    async def _run_silently(self, code: str) -> None:
        """Run code that is ours; what comes of it is for nobody."""
        if code:
            try:
                async for _ in self.kernel.execute(code, silent=True):
                    pass
            except KernelDied:
                self.set_before = {}

    async def _stop(self, given: Mapping[str, str], common: Mapping[str, str]) -> None:
        try:
            await self.kernel.interrupt()
            try:
                # A nothing comes after what was interrupted: when it is done, so is that.
                await asyncio.wait_for(self._run_nothing(), INTERRUPT_LIMIT_S)
                await self._restore(given, common)
            except TimeoutError:
                log.warning("context %s does not give in to an interrupt: restarting it", self.id)
                await self.restart()
        finally:
            self.free.release()

    async def _run_nothing(self) -> None:
        async for _ in self.kernel.execute("", silent=True):
            pass


_pending: set[asyncio.Task[None]] = set()  # a task that nobody holds may vanish


class Contexts:
    """All contexts of this server.

    Args:
        home: the directory of a context that does not say, and of those by default.
        environment: where the sandbox's variables come from.
        installed: tells the names of the kernels that there are.
        start: starts one.
    """

    def __init__(
        self, home: str, environment: Environment, installed: Callable[[], Iterable[str]], start: Starts
    ) -> None:
        self._home, self._environment, self._installed, self._start = home, environment, installed, start
        self._contexts: dict[str, Context] = {}
        self._default: dict[str, str] = {}
        self._starting: dict[str, asyncio.Lock] = {}

    def list(self) -> list[Context]:
        """All of them, the oldest first."""
        return [*self._contexts.values()]

    def get(self, identifier: str) -> Context:
        """The one of that id.

        Raises:
            NoSuchContext: there is none.
        """
        if identifier not in self._contexts:
            raise NoSuchContext(f"Context {identifier} not found")
        return self._contexts[identifier]

    async def create(self, language: str | None, cwd: str | None) -> Context:
        """A new context.

        Raises:
            CannotStart: no such language or directory.
        """
        name = languages.canonical(language)
        directory = cwd or self._home
        kernel = languages.kernel_for(name, self._installed())
        if kernel is None:
            raise CannotStart(f"there is no kernel for the language {name}")
        if not os.path.isdir(directory):  # noqa: PTH112 - it is text from the outside
            raise CannotStart(f"{directory} is not a directory")
        try:
            context = Context(str(uuid.uuid4()), name, directory, await self._start(kernel, directory))
        except (RuntimeError, OSError) as error:  # the kernel's own, and its program's
            raise CannotStart(f"the kernel {kernel} does not start: {error}") from error
        self._contexts[context.id] = context
        return context

    async def default(self, language: str | None = None) -> Context:
        """The context for code that names none, made at its first use.

        Raises:
            CannotStart: as `create`.
        """
        name = languages.canonical(language)
        async with self._starting.setdefault(name, asyncio.Lock()):
            known = self._contexts.get(self._default.get(name, ""))
            if known is None:
                known = await self.create(name, None)
                self._default[name] = known.id
            return known

    async def prepare(self, wanted: Iterable[str]) -> None:
        """Start and prepare the contexts by default of these languages, where there are kernels for them.

        Raises:
            ExceptionGroup: of CannotStart.
        """
        installed = [*self._installed()]
        async with asyncio.TaskGroup() as tasks:
            for language in wanted:
                if languages.kernel_for(language, installed) is not None:
                    tasks.create_task(self._prepare(language))

    async def _prepare(self, language: str) -> None:
        await (await self.default(language)).prepare()

    async def rehearse(self) -> AsyncGenerator[Line, None]:
        """Rehearse in the contexts that nobody has used yet."""
        await self.variables(None)
        for context in self.list():
            if context.prepared:
                async with aclosing(context.rehearse()) as lines:
                    async for line in lines:
                        yield line

    async def variables(self, token: str | None) -> dict[str, str]:
        """The variables of the sandbox."""
        return await self._environment.variables(token)

    async def restart(self, identifier: str) -> None:
        """Restart a context's kernel. Raises NoSuchContext."""
        await self.get(identifier).restart()

    async def remove(self, identifier: str) -> None:
        """End a context. Raises NoSuchContext."""
        context = self.get(identifier)
        del self._contexts[identifier]
        await context.kernel.end()

    async def end(self) -> None:
        """End all of them."""
        for context in self.list():
            await self.remove(context.id)
