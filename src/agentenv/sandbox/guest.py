"""What the node does in a guest on its own account: commands run, files put there, as clients would.

A build's steps are this, and the start command of a template.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, urlencode

import h11

from agentenv.errors import GuestFault
from agentenv.sandbox.agent import AGENT_PORT, REDIAL_EVERY_S, dial, unless_exit
from agentenv.vmm.machine import Machine

COMMAND_LIMIT_S = 3600.0
CHUNK_BYTES = 256 * 1024
STILL_S = 600.0  # for which a transfer may stand still
_GRACE_S = 60.0  # that the agent has, after a command's time, to say that it is over
ANSWER_LIMIT_BYTES = 1 << 20
MESSAGE_LIMIT_BYTES = 4 << 20  # the agent joins output up to a 64th of that

_WORDS_LIMIT = 500  # characters of what a guest says that are repeated in errors
_LAST = 2  # the flag of a stream's last envelope (Connect protocol)
_STDOUT_STDERR = ("stdout", "stderr")

T = TypeVar("T")
Output = Callable[[str, bytes], None]


@dataclass(frozen=True)
class Command:
    """A program to run: its words, as whom, where, and with which variables besides the guest's own."""

    argv: tuple[str, ...]
    user: str
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def shell(
        cls, text: str, user: str, workdir: str | None = None, env: Mapping[str, str] | None = None
    ) -> Command:
        """What E2B's clients make of a command's text: a login shell. In an image without bash the agent
        takes another shell."""
        return cls(("/bin/bash", "-l", "-c", text), user, workdir, env or {})


class CommandFailed(GuestFault):
    """A command that did not succeed; the message is in E2B's words for it."""

    code = "command_failed"


class Guest:
    """A guest whose agent is ready, and lets everybody in.

    Args:
        machine: the machine; when it ends, so do the calls.
        address: where its agent is reached.
    """

    def __init__(self, machine: Machine, address: str, port: int = AGENT_PORT) -> None:
        self._machine = machine
        self._address = address
        self._port = port

    async def run(self, command: Command, output: Output, *, limit_s: float = COMMAND_LIMIT_S) -> None:
        """Run a command to its end; `output(stream, data)` is told what it writes, as it comes. A cancelled
        caller leaves it running.

        Raises:
            CommandFailed: it could not be started, did not succeed, or took longer than `limit_s` seconds,
                after which it is killed. GuestFault: the machine or its agent is gone.
        """
        try:
            async with asyncio.timeout(limit_s + _GRACE_S):
                await unless_exit(self._machine, self._run(command, output, limit_s))
        except TimeoutError:
            raise GuestFault(
                f"the agent at {self._address} did not end a command after {limit_s:g} s"
            ) from None

    async def _run(self, command: Command, output: Output, limit_s: float) -> None:
        message = json.dumps({"process": _process(command), "stdin": False}).encode()
        headers = {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Connect-Timeout-Ms": str(round(limit_s * 1000)),
            "Authorization": "Basic " + base64.b64encode(f"{command.user}:".encode()).decode(),
        }
        body = struct.pack(">BI", 0, len(message)) + message
        async with _Exchange(self._address, self._port) as exchange:
            await exchange.begin("/process.Process/Start", headers, len(body))
            exchange.send(body)
            exchange.send_end()
            if (await exchange.status()) != 200:
                raise CommandFailed(f"command failed: {_words(await exchange.whole())}")
            async for flag, message in _envelopes(exchange.body()):
                if _told(flag, _document(message), output):
                    return
        raise GuestFault(f"the agent at {self._address} did not say how the command ended")

    async def fetch(self, path: str, take: Callable[[AsyncIterator[bytes]], Coroutine[Any, Any, T]]) -> T:
        """What `take` makes of a file of the guest, read as root.

        Raises:
            GuestFault: there is no such file, or the machine or its agent is gone.
        """
        return await unless_exit(self._machine, self._fetch(path, take))

    async def _fetch(self, path: str, take: Callable[[AsyncIterator[bytes]], Coroutine[Any, Any, T]]) -> T:
        target = "/files?" + urlencode({"path": path, "username": "root"}, quote_via=quote)
        async with _Exchange(self._address, self._port, STILL_S) as exchange:
            await exchange.begin(target, {"Accept-Encoding": "identity"}, 0, method="GET")
            exchange.send_end()
            if (await exchange.status()) != 200:
                raise GuestFault(f"{path} of the guest cannot be read: {_words(await exchange.whole())}")
            return await take(exchange.body())

    async def put(self, path: str, file: BinaryIO, size: int) -> None:
        """Put a file's next `size` bytes into the guest at `path`, as root.

        Raises:
            GuestFault: it was not taken, or the machine or its agent is gone.
        """
        await unless_exit(self._machine, self._put(path, file, size))

    async def _put(self, path: str, file: BinaryIO, size: int) -> None:
        target = "/files?" + urlencode({"path": path, "username": "root"}, quote_via=quote)
        async with _Exchange(self._address, self._port, STILL_S) as exchange:
            await exchange.begin(target, {"Content-Type": "application/octet-stream"}, size)
            left = size
            while left:
                data = await asyncio.to_thread(file.read, min(left, CHUNK_BYTES))
                if not data:
                    raise GuestFault(f"{path}: there are {left} bytes less than there should be")
                left -= len(data)
                exchange.send(data)
                await exchange.drain()
            exchange.send_end()
            status = await exchange.status()
            answer = await exchange.whole()
        if not 200 <= status < 300:
            raise GuestFault(f"{path} cannot be put into the guest: {_words(answer)}")


class _Exchange:
    """One request on a connection of its own, and its answer; `still_s` is for how long nothing may move."""

    def __init__(self, address: str, port: int, still_s: float | None = None) -> None:
        self._still_s = still_s
        self._address = address
        self._port = port
        self._http = h11.Connection(h11.CLIENT)

    async def __aenter__(self) -> _Exchange:
        self._reader, self._writer = await dial(self._address, self._port, REDIAL_EVERY_S)
        return self

    async def __aexit__(self, *fault: object) -> None:
        self._writer.close()

    async def begin(
        self, target: str, headers: Mapping[str, str], length: int, *, method: str = "POST"
    ) -> None:
        given = [("Host", self._address), *headers.items(), ("Content-Length", str(length))]
        self._write(self._http.send(h11.Request(method=method, target=target, headers=given)))

    def send(self, data: bytes) -> None:
        self._write(self._http.send(h11.Data(data=data)))

    def send_end(self) -> None:
        self._write(self._http.send(h11.EndOfMessage()))

    def _write(self, data: bytes | None) -> None:
        if data:
            self._writer.write(data)

    async def drain(self) -> None:
        try:
            async with asyncio.timeout(self._still_s):
                await self._writer.drain()
        except TimeoutError:
            raise self._still() from None
        except OSError as error:
            raise GuestFault(f"the agent at {self._address} broke the connection: {error}") from error

    async def status(self) -> int:
        event = await self._next()
        assert isinstance(event, h11.Response)
        return event.status_code

    async def body(self) -> AsyncIterator[bytes]:
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            assert isinstance(event, h11.Data)
            yield bytes(event.data)

    async def whole(self) -> bytes:
        found = b""
        async for part in self.body():
            found += part
            if len(found) > ANSWER_LIMIT_BYTES:
                raise GuestFault(f"the answer of the agent at {self._address} is too long")
        return found

    async def _next(self) -> h11.Event:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA or isinstance(
                event, h11.InformationalResponse
            ):
                async with asyncio.timeout(self._still_s):
                    data = await self._reader.read(CHUNK_BYTES)
                self._http.receive_data(data)
        except TimeoutError:
            raise self._still() from None
        except (OSError, h11.RemoteProtocolError) as error:
            raise GuestFault(f"the agent at {self._address} broke its answer off: {error}") from error
        if not isinstance(event, h11.Event) or isinstance(event, h11.ConnectionClosed):
            raise GuestFault(f"the agent at {self._address} ended the connection")
        return event

    def _still(self) -> GuestFault:
        return GuestFault(f"nothing came from or went to the agent at {self._address} in {self._still_s} s")


def _process(command: Command) -> dict[str, Any]:
    given: dict[str, Any] = {
        "cmd": command.argv[0],
        "args": list(command.argv[1:]),
        "envs": dict(command.env),
    }
    if command.workdir:
        given["cwd"] = command.workdir
    return given


async def _envelopes(body: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """The messages of a stream (Connect protocol: a flag, four bytes of length, the message)."""
    buffer = bytearray()
    async for part in body:
        buffer += part
        while len(buffer) >= 5:
            flag, length = struct.unpack_from(">BI", buffer)
            if length > MESSAGE_LIMIT_BYTES:
                raise GuestFault("a message of the agent is too long")
            if len(buffer) < 5 + length:
                break
            yield flag, bytes(buffer[5 : 5 + length])
            del buffer[: 5 + length]


def _document(message: bytes) -> dict[str, Any]:
    try:
        document = json.loads(message)
    except (ValueError, RecursionError):  # the latter for what is nested too deeply
        document = None
    if not isinstance(document, dict):
        raise GuestFault("a message of the agent is none of a process's")
    return document


def _told(flag: int, message: Mapping[str, Any], output: Output) -> bool:
    """Take one message in; whether the command has ended well.

    Raises:
        CommandFailed: it has not.
    """
    if flag & _LAST and (error := message.get("error")):
        told = _part(error)
        raise CommandFailed(f"command failed: {_word(told.get('code'))}: {_word(told.get('message'))}")
    event = _part(message.get("event"))
    for stream in _STDOUT_STDERR:
        if encoded := _part(event.get("data")).get(stream):
            output(stream, _decoded(encoded))
    if event.get("end") is None:
        return False
    end = _part(event["end"])
    if end.get("exitCode") or not end.get("exited", True):
        raise CommandFailed(_word(end.get("status") or f"exit status {end.get('exitCode')}"))
    return True


def _part(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _word(value: object) -> str:
    return str(value)[:_WORDS_LIMIT]


def _decoded(encoded: object) -> bytes:
    try:
        return base64.b64decode(encoded) if isinstance(encoded, str) else b""
    except ValueError:
        raise GuestFault("output of a command is not encoded as it should be") from None


def _words(answer: bytes) -> str:
    """What an error's body says."""
    try:
        said = json.loads(answer)
        return _word(f"{said['code']}: {said['message']}")
    except (ValueError, KeyError, TypeError, RecursionError):
        return answer.decode(errors="replace")[:_WORDS_LIMIT]
