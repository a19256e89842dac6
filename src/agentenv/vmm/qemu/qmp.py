"""A client of QEMU's machine protocol (QMP) on an asyncio loop.

Messages are JSON objects, one a line, as docs/interop/qmp-spec.rst of QEMU describes. A QMP socket
serves one client at a time; a second one waits for a greeting that does not come.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentenv.errors import HostFault, OutcomeUnknown
from agentenv.vmm import sockets

log = logging.getLogger(__name__)

EventCallback = Callable[[str, dict[str, object]], None]
Command = tuple[str, Mapping[str, object] | None, *tuple[int, ...]]
"""A command's name, arguments, and descriptors to be sent along."""

Accept = Callable[[dict[str, Any]], bool]

_LINE_LIMIT = 8 << 20  # a guest that took over its hypervisor must not fill the node's memory


class QmpRefused(HostFault):
    """QEMU answered with an error. `kind` is QMP's error class, such as GenericError."""

    def __init__(self, command: str, kind: str, description: str) -> None:
        super().__init__(f"QEMU refused {command}: {description}")
        self.kind = kind
        self.description = description


class QmpClosed(HostFault):
    """The connection was closed by this side."""


class QmpBroken(HostFault):
    """The connection was ended by QEMU, mostly since the process is gone."""


class QmpTimeout(OutcomeUnknown):
    """No answer within the limit; the command may still take effect."""


class Qmp:
    """A connection after its greeting. Any number of commands may be under way at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._received = bytearray()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._callbacks: list[EventCallback] = []
        self._expected: list[tuple[str, Accept, asyncio.Future[dict[str, Any]]]] = []
        self._sending = asyncio.Lock()
        self._greeting: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._end: HostFault | None = None
        self._loop.add_reader(connection, self._readable)

    @classmethod
    async def connect(cls, path: Path, *, timeout: float) -> Qmp:
        """Connect, be greeted and leave negotiation mode, in at most `timeout` seconds.

        Raises:
            QmpBroken: nobody listens, or QEMU went away.
            QmpTimeout: no greeting; another client may be connected.
        """
        try:
            client = cls(sockets.connect(path))
        except OSError as error:
            raise QmpBroken(f"cannot connect to the QMP socket {path}: {error.strerror}") from error
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(client._greeting)
            await client.execute("qmp_capabilities", timeout=timeout)
        except TimeoutError:
            client.close()
            raise QmpTimeout(
                f"no greeting from the QMP socket {path} in {timeout:g} s",
                remedy="another program may be connected to it; QEMU serves one at a time",
            ) from None
        except BaseException:
            client.close()
            raise
        return client

    @property
    def version(self) -> tuple[int, int, int]:
        """QEMU's version, from the greeting."""
        numbers = self._greeting.result()["version"]["qemu"]
        return int(numbers["major"]), int(numbers["minor"]), int(numbers["micro"])

    @property
    def closed(self) -> bool:
        """Whether either side has ended the connection."""
        return self._end is not None

    def on_event(self, callback: EventCallback) -> None:
        """Call back with the name and data of each event, in order, on the loop."""
        self._callbacks.append(callback)

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, object] | None = None,
        *,
        timeout: float = 30.0,
        descriptors: Sequence[int] = (),
    ) -> Any:
        """What a command returns; `descriptors` are sent along (`getfd`, `add-fd`).

        Raises:
            QmpRefused: QEMU answered with an error.
            QmpTimeout: no answer in `timeout` seconds; a late one is dropped.
            QmpBroken, QmpClosed: the connection ended before the answer.
        """
        number = next(self._numbers)
        message: dict[str, object] = {"execute": command, "id": number}
        if arguments:
            message["arguments"] = arguments
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[number] = (command, answer)
        try:
            async with asyncio.timeout(timeout):
                # Without spaces: QEMU reads each byte by a system call of its own, 5 microseconds each.
                text = json.dumps(message, separators=(",", ":"))
                await self._send(command, text.encode() + b"\n", descriptors)
                return await answer
        except TimeoutError:
            raise QmpTimeout(f"QEMU did not answer {command} in {timeout:g} s") from None
        finally:
            self._waiting.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, even where the wait for it was given up

    async def together(self, *commands: Command, timeout: float = 30.0) -> list[Any]:
        """What several commands return, which are sent at once and carried out in order: one round trip.
        A command that is refused does not keep the following from being tried.

        Raises:
            HostFault, OutcomeUnknown: the first failure, after all have been answered; see `execute`.
        """
        answers = await asyncio.gather(
            *(
                self.execute(name, arguments, timeout=timeout, descriptors=descriptors)
                for name, arguments, *descriptors in commands
            ),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def expect(self, name: str, accept: Accept) -> asyncio.Future[dict[str, Any]]:
        """The data of the next event of that name that is accepted. To be called before the command that
        brings it about; fails with `QmpBroken` or `QmpClosed` when the connection ends first."""
        coming: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        if self._end is not None:
            coming.set_exception(type(self._end)(f"{name}: {self._end.message}"))
        else:
            self._expected.append((name, accept, coming))
        return coming

    async def wait_closed(self) -> None:
        """Return when the connection has ended; all events before that have been delivered."""
        await asyncio.shield(self._ended)

    def close(self) -> None:
        """End the connection; QEMU then takes another client. Repeatable."""
        self._finish(QmpClosed, "the connection to QEMU was closed")

    async def _send(self, command: str, data: bytes, descriptors: Sequence[int]) -> None:
        async with self._sending:
            rest = memoryview(data)
            try:
                while rest:
                    self._check(command)
                    try:
                        sent = (
                            socket.send_fds(self._socket, [rest], descriptors)
                            if descriptors
                            else self._socket.send(rest)
                        )
                    except BlockingIOError:
                        await self._writable()
                        continue
                    rest, descriptors = rest[sent:], ()
            except OSError as error:
                self._finish(QmpBroken, f"QEMU ended the connection ({error.strerror})")
                self._check(command)
            except asyncio.CancelledError:
                if len(rest) < len(data):
                    self._finish(QmpBroken, f"{command} was cut off half sent")
                raise

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._socket, _fulfil, ready)
        try:
            await asyncio.wait({ready, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not self.closed:
                self._loop.remove_writer(self._socket)

    def _check(self, command: str) -> None:
        if self._end is not None:
            raise type(self._end)(f"{command}: {self._end.message}")

    def _readable(self) -> None:
        try:
            data = self._socket.recv(262144)
        except BlockingIOError:
            return
        except OSError as error:
            self._finish(QmpBroken, f"QEMU ended the connection ({error.strerror})")
            return
        if not data:
            self._finish(QmpBroken, "QEMU ended the connection")
            return
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        for line in lines:
            self._accept(bytes(line))
        if len(self._received) > _LINE_LIMIT:
            self._finish(QmpBroken, "QEMU sent a message without an end")

    def _accept(self, line: bytes) -> None:
        try:
            message = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):  # the latter for what is nested too deeply
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("error", {}), dict):
            self._finish(QmpBroken, "QEMU sent what is no message")
            return
        if "event" in message:
            for callback in self._callbacks:
                # Through the loop, so that a callback that fails harms neither the others nor this.
                self._loop.call_soon(callback, message["event"], message.get("data", {}))
            self._meet(message["event"], message.get("data", {}))
        elif "QMP" in message and not self._greeting.done():
            self._greeting.set_result(message["QMP"])
        elif message.get("id") in self._waiting:
            command, answer = self._waiting.pop(message["id"])
            if answer.done():
                return
            if "error" in message:
                error = message["error"]
                answer.set_exception(QmpRefused(command, error.get("class", ""), error.get("desc", "")))
            else:
                answer.set_result(message.get("return"))

    def _meet(self, name: str, data: dict[str, Any]) -> None:
        left = []
        for expected, accept, coming in self._expected:
            if coming.done():
                continue
            if expected == name and accept(data):
                coming.set_result(data)
            else:
                left.append((expected, accept, coming))
        self._expected = left

    def _finish(self, kind: type[QmpClosed] | type[QmpBroken], reason: str) -> None:
        if self._end is not None:
            return
        self._end = kind(reason)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for command, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(kind(f"{command}: {reason}"))
        self._waiting.clear()
        for name, _, coming in self._expected:
            if not coming.done():
                coming.set_exception(kind(f"{name}: {reason}"))
                coming.exception()  # seen, even where nobody waits for it any more
        self._expected.clear()
        if not self._greeting.done():
            self._greeting.set_exception(kind(reason))
            self._greeting.exception()  # seen; `connect` raises it where it waits
        # After the events that were read before the end.
        self._loop.call_soon(_fulfil, self._ended)


def _fulfil(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
