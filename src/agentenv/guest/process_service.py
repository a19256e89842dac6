"""`process.Process`: the calls that start, follow, feed and signal processes."""

from __future__ import annotations

import os

from agentenv.guest import connect, launch, loop, process, terminal
from agentenv.guest.connect import (
    ConnectError,
    Last,
    bytes_field,
    field,
    flag_field,
    int_field,
    object_field,
    text_field,
)
from agentenv.guest.lean import signal
from agentenv.guest.process_input import InputClosed
from agentenv.guest.process_output import data_event

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from typing import Any

    from agentenv.guest.connect import Item, Message
    from agentenv.guest.context import Context
    from agentenv.guest.http import Request, Router
    from agentenv.guest.process import Process
    from agentenv.guest.users import User

RETAIN_SECONDS = 30.0  # how long the end of a process can still be asked for
KEEPALIVE = b'{"event":{"keepalive":{}}}'
_SIGNALS = {
    "SIGNAL_SIGTERM": signal.SIGTERM,
    "SIGNAL_SIGKILL": signal.SIGKILL,
    "15": signal.SIGTERM,
    "9": signal.SIGKILL,
}


def register(router: Router, context: Context) -> Processes:
    """Adds the service's calls to the router."""
    service = Processes(context)
    connect.server_stream(router, "/process.Process/Start", service.start)
    connect.server_stream(router, "/process.Process/Connect", service.connect)
    connect.client_stream(router, "/process.Process/StreamInput", service.stream_input)
    for name, call in (
        ("List", service.list),
        ("SendSignal", service.send_signal),
        ("SendInput", service.send_input),
        ("CloseStdin", service.close_stdin),
        ("Update", service.update),
    ):
        connect.unary(router, f"/process.Process/{name}", call)
    return service


class Processes:
    """The processes that clients started: the running ones, and for a while those that ended."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[int, Process] = {}

    async def start(self, message: Message, request: Request) -> AsyncGenerator[Item, None]:
        """Starts a process and follows it. It lives on when its client leaves."""
        user = self._context.user_of(request)
        timeout = connect.timeout_of(request)
        started = self._launch(message, user)
        if timeout:
            started.expire_after(timeout)
        async for item in self._follow(started, connect.keepalive_interval(request)):
            yield item
        if started.expired:
            raise ConnectError("deadline_exceeded", f"the process was killed after its {timeout} seconds")
        yield Last({"event": {"end": started.end}})

    async def connect(self, message: Message, request: Request) -> AsyncGenerator[Item, None]:
        """Follows a process from now on; one that ended less than 30 s ago gives its end."""
        found = self._find(message, ended_too=True)
        timeout = connect.timeout_of(request)
        until = loop.now() + timeout if timeout else None
        async for item in self._follow(found, connect.keepalive_interval(request), until):
            yield item
        yield Last({"event": {"end": found.end}})

    async def list(self, message: Message, request: Request) -> Message:
        """The running processes."""
        rows: list[Message] = []
        for running in self._known.values():
            if running.end is None:
                row = {"config": running.config, "pid": running.pid}
                if running.tag is not None:
                    row["tag"] = running.tag
                rows.append(row)
        return {"processes": rows}

    async def send_signal(self, message: Message, request: Request) -> Message:
        """Sends SIGTERM or SIGKILL."""
        wanted = str(field(message, "signal", ""))
        if wanted not in _SIGNALS:
            raise ConnectError("invalid_argument", f"unknown signal {wanted!r}")
        found = self._find(message)
        try:
            found.signal(_SIGNALS[wanted])
        except ProcessLookupError:
            raise _not_found(message) from None
        return {}

    async def send_input(self, message: Message, request: Request) -> Message:
        """Writes to a process's standard input or terminal."""
        await self._write(self._find(message), object_field(message, "input") or {})
        return {}

    async def close_stdin(self, message: Message, request: Request) -> Message:
        """Ends a process's standard input."""
        found = self._find(message)
        if found.terminal is not None:
            raise ConnectError("internal", "a terminal's input cannot be closed: send Ctrl+D (0x04) instead")
        if found.input is not None:
            await found.input.finish()
        return {}

    async def stream_input(self, messages: AsyncIterator[Message], request: Request) -> Message:
        """Writes what a client streams."""
        target: Process | None = None
        async for message in messages:
            event = object_field(message, "event") or message
            begun = object_field(event, "start")
            data = object_field(event, "data")
            if begun is not None:
                target = self._find(begun)
            elif data is not None:
                if target is None:
                    raise ConnectError("invalid_argument", "the first message must be start")
                await self._write(target, object_field(data, "input") or {})
        return {}

    async def update(self, message: Message, request: Request) -> Message:
        """Changes a terminal's size."""
        found = self._find(message)
        size = _size_of(message)
        if size is not None:
            if found.terminal is None or not found.terminal.open:
                raise ConnectError("internal", "the process has no terminal")
            terminal.resize(found.terminal.fd, *size)
        return {}

    def _launch(self, message: Message, user: User) -> Process:
        config = object_field(message, "process") or {}
        command = text_field(config, "cmd")
        arguments = field(config, "args", [])
        extra = object_field(config, "envs") or {}
        if not command:
            raise ConnectError("invalid_argument", "process.cmd is empty")
        if not isinstance(arguments, list) or not all(isinstance(word, str) for word in arguments):
            raise ConnectError("invalid_argument", "process.args is not a list of strings")
        if not all(isinstance(value, str) for value in extra.values()):
            raise ConnectError("invalid_argument", "process.envs is not a map of strings")
        tag = text_field(message, "tag") or None
        shown: dict[str, Any] = {"cmd": command, "args": arguments, "envs": extra}
        if cwd := text_field(config, "cwd"):
            shown["cwd"] = cwd
        try:
            started = process.start(
                [command, *arguments],
                self._environment(user, extra),
                self._directory(user, cwd),
                user,
                stdin=flag_field(message, "stdin", True),
                size=_size_of(message),
                config=shown,
                tag=tag,
            )
        except (OSError, ValueError) as error:
            raise _start_error(error, command) from error
        self._known.pop(started.pid, None)  # an ended one that had the same pid
        self._known[started.pid] = started
        started.on_end = lambda: loop.call_later(RETAIN_SECONDS, lambda: self._forget(started))
        return started

    def _forget(self, started: Process) -> None:
        if self._known.get(started.pid) is started:
            del self._known[started.pid]

    def _environment(self, user: User, extra: dict[str, str]) -> dict[str, str]:
        env = {"PATH": launch.PATH, "HOME": user.home, "USER": user.name, "LOGNAME": user.name}
        env.update(self._context.env)
        env.update(extra)
        return env

    def _directory(self, user: User, asked: str) -> str:
        wanted = asked or self._context.default_workdir or ""
        if wanted in ("", "~"):
            path = user.home
        elif wanted.startswith("~/"):
            path = os.path.join(user.home, wanted[2:])
        else:
            path = os.path.join(user.home, wanted)
        if os.path.isdir(path):
            return path
        if not asked:  # the default is nobody's wish, and small images have no home directories
            return "/"
        fault = "is not a directory" if os.path.exists(path) else "does not exist"
        raise ConnectError("invalid_argument", f"cwd '{path}' {fault}")

    async def _follow(
        self, found: Process, interval: float, until: float | None = None
    ) -> AsyncGenerator[Item, None]:
        """A process's start and output, as events; ends when the process has."""
        subscription = found.subscribe()
        try:
            yield b'{"event":{"start":{"pid":%d}}}' % found.pid
            while True:
                patience = interval if until is None else min(interval, until - loop.now())
                if patience <= 0:
                    raise ConnectError("deadline_exceeded", "the time for following the process is over")
                try:
                    item = await subscription.take(patience)
                except TimeoutError:
                    yield KEEPALIVE
                    continue
                if item is None:
                    return
                yield data_event(*item)
        finally:
            found.unsubscribe(subscription)

    def _find(self, message: Message, *, ended_too: bool = False) -> Process:
        selector = object_field(message, "process") or {}
        tag = field(selector, "tag")
        if tag is not None:
            matches = [known for known in self._known.values() if known.tag == tag]
            # Of several with one tag: the running one, and of those the newest.
            found = max(matches, key=lambda known: known.end is None, default=None)
            for known in matches:
                if known.end is None:
                    found = known
        else:
            found = self._known.get(int_field(selector, "pid"))
        if found is None or (found.end is not None and not ended_too):
            raise _not_found(message)
        return found

    async def _write(self, found: Process, message: Message) -> None:
        kind = "stdin" if found.terminal is None else "pty"
        data = bytes_field(message, kind)
        if data is None:
            if kind == "pty" and field(message, "stdin") is not None:
                raise ConnectError("internal", "the process has a terminal: send pty input instead of stdin")
            if kind == "stdin" and field(message, "pty") is not None:
                raise ConnectError("internal", "the process has no terminal: send stdin input instead of pty")
            raise ConnectError("invalid_argument", "the message holds no input")
        if found.input is None:
            raise ConnectError("internal", "the process was started without standard input")
        try:
            await found.input.write(data)
        except InputClosed as error:
            raise ConnectError("internal", str(error)) from error


def _size_of(message: Message) -> tuple[int, int] | None:
    pty = object_field(message, "pty")
    if pty is None:
        return None
    size = object_field(pty, "size") or {}
    cols, rows = int_field(size, "cols", 80), int_field(size, "rows", 24)
    if not (0 <= cols <= 0xFFFF and 0 <= rows <= 0xFFFF):
        raise ConnectError("invalid_argument", "the terminal's size is out of range")
    return cols, rows


def _not_found(message: Message) -> ConnectError:
    selector = object_field(message, "process") or {}
    tag = field(selector, "tag")
    if tag is not None:
        return ConnectError("not_found", f"process with tag {tag} not found")
    return ConnectError("not_found", f"process with pid {int_field(selector, 'pid')} not found")


def _start_error(error: OSError | ValueError, command: str) -> ConnectError:
    if isinstance(error, (BlockingIOError, MemoryError)):
        return ConnectError("resource_exhausted", f"cannot start '{command}': {error}")
    return ConnectError("invalid_argument", f"error starting process '{command}': {error}")
