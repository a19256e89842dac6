"""Client of the guest agent's own calls: is it there, and `POST /init`.

What clients ask of the agent goes through the proxy and never through here.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import struct
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import h11

from agentenv.errors import AenvError, GuestFault
from agentenv.snapshot.records import Attached
from agentenv.vmm.machine import Machine, drive_serial

AGENT_PORT = 49983
ENTROPY_BYTES = 256
ANSWER_LIMIT_BYTES = 65536
# A SYN to a booting guest is lost or refused, and the kernel repeats a lost one only after a second:
# so new attempts begin while older ones may still succeed. They come thick at first, for a machine that
# is nearly there, and thinner later: the guest has to deal with all that were queued for it.
DIAL_EVERY_S = (0.02, 0.1)
# One that was restored listens already and loses nothing: each attempt more is work for a guest that is
# only slow, and with many starting at once they slow each other down.
REDIAL_EVERY_S = (1.0, 4.0)
DIAL_GROWTH = 1.1
DIAL_LIMIT_S = 1.0
CALL_LIMIT_S = 30.0
_WORDS_LIMIT = 500  # characters of what a guest says that are repeated in errors
DRIVE_STATUS = 422  # by which the agent says that a drive or the root disk cannot be used as it is wanted

JSON = {"Content-Type": "application/json"}
# As E2B's clients start every command; and what the template has to be rehearsed of its own.
REHEARSAL = "/etc/agentenv/rehearse"
REHEARSED = {"cmd": "/bin/bash", "args": ["-l", "-c", f"[ ! -x {REHEARSAL} ] || {REHEARSAL}"]}

T = TypeVar("T")
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Identity:
    """What makes a booted or restored machine this sandbox. What is None stays as it is in the guest;
    the clock and the randomness come with every one, and the end of old connections unless there
    are the `same_peers` as before. An empty access token lets everyone in. `drives` are those that the
    guest does not have mounted yet, by their places; with `disk_mib` the root filesystem is to have a disk of
    so many MiB."""

    sandbox_id: str | None = None
    template_id: str | None = None
    hostname: str | None = None
    machine_id: str | None = None
    env: dict[str, str] | None = None
    access_token: str | None = None
    default_user: str | None = None
    default_workdir: str | None = None
    ca_bundle: str | None = None
    same_peers: bool = False
    ipv6: bool | None = None
    drives: Mapping[int, Attached] = field(default_factory=dict)
    disk_mib: int | None = None


class Refused(GuestFault):
    """The agent answered, and it was no."""


class DriveFailed(Refused):
    """A drive cannot be used in the guest as it was asked for; the message names it."""

    status = 400
    code = "drive"


def init_document(identity: Identity, *, now: float, entropy: bytes) -> dict[str, Any]:
    """The body of `POST /init`. The timestamp is RFC 3339 with nanoseconds, as E2B's own."""
    seconds, fraction = divmod(now, 1)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(fraction * 1e9):09d}Z"
    document: dict[str, Any] = {
        "sandboxId": identity.sandbox_id,
        "templateId": identity.template_id,
        "hostname": identity.hostname,
        "machineId": identity.machine_id,
        "envVars": identity.env,
        "timestamp": stamp,
        "defaultUser": identity.default_user,
        "defaultWorkdir": identity.default_workdir,
        "accessToken": identity.access_token,
        "caBundle": identity.ca_bundle,
        "drives": [_drive(place, drive) for place, drive in identity.drives.items()] or None,
        "diskSizeMB": identity.disk_mib,
        "entropy": base64.b64encode(entropy).decode(),
        "ipv6": identity.ipv6,
        "lifecycleID": None if identity.same_peers else secrets.token_hex(8),
    }
    return {name: value for name, value in document.items() if value is not None}


def _drive(place: int, drive: Attached) -> dict[str, Any]:
    return {
        "name": drive.id,
        "serial": drive_serial(place),
        "path": drive.path,
        "readOnly": drive.read_only,
        "subPath": drive.part,
    }


class Agent:
    """One connection to the agent of the guest at `address`, made anew when it breaks.

    `around` adds to an identity what all guests of a node are told (`surroundings`)."""

    def __init__(
        self,
        address: str,
        port: int = AGENT_PORT,
        *,
        around: Callable[[Identity], Identity] = lambda identity: identity,
    ) -> None:
        self._around = around
        self._address = address
        self._port = port
        self._streams: _Streams | None = None
        self._dial_every_s = DIAL_EVERY_S

    async def wait_ready(self, machine: Machine, limit_s: float) -> None:
        """Return once the agent has answered.

        Raises:
            GuestFault: the machine ended first, or there was no answer within `limit_s` seconds.
        """
        await self._first_answer(machine, self.health, limit_s)

    async def take_over(self, machine: Machine, identity: Identity, limit_s: float) -> None:
        """Give the guest its identity as soon as the agent answers; its first answer is to that.

        Raises:
            DriveFailed: a drive cannot be used as it is wanted. Refused: it says no.
            GuestFault: as `wait_ready`.
        """
        self._dial_every_s = REDIAL_EVERY_S
        await self._first_answer(machine, lambda: self._init(identity), limit_s)

    async def _first_answer(
        self, machine: Machine, ask: Callable[[], Coroutine[Any, Any, None]], limit_s: float
    ) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await unless_exit(machine, self._repeated(ask))
        except TimeoutError:
            raise GuestFault(
                f"the agent of machine {machine.spec.id} did not answer within {limit_s:g} s; "
                f"last on the console: {last_line(machine.console_tail())}",
                remedy="AENV_BOOT_TIMEOUT_S and AENV_RESUME_TIMEOUT_S are the limits",
            ) from None

    async def _repeated(self, ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await ask()
                return
            except Refused:
                raise
            except (OSError, GuestFault):  # the listener came up or went away under the request
                await self.close()
                await asyncio.sleep(DIAL_EVERY_S[0])

    async def health(self) -> None:
        """Ask whether the agent serves.

        Raises:
            GuestFault: it answers something else. OSError: it is not reached.
        """
        await self._call("GET", "/health", None)

    async def init(self, identity: Identity) -> None:
        """Give the guest its identity, the time and fresh randomness.

        Raises:
            GuestFault: the agent refuses or does not answer.
        """
        try:
            await self._init(identity)
        except OSError as error:
            raise GuestFault(f"the agent at {self._address} does not take /init: {error}") from error

    async def _init(self, identity: Identity) -> None:
        document = init_document(self._around(identity), now=time.time(), entropy=os.urandom(ENTROPY_BYTES))
        await self._call("POST", "/init", json.dumps(document).encode())

    async def figures(self, token: str | None) -> Mapping[str, object]:
        """What the guest says of its memory and its disk: the document that it serves as `/metrics`. It need
        not be true.

        Raises:
            GuestFault: the agent does not answer, or with something else. OSError: it is not reached.
        """
        headers = {**JSON, "X-Access-Token": token} if token else JSON
        answer = await self._call("GET", "/metrics", None, headers)
        try:
            document = json.loads(answer)
        except (ValueError, RecursionError):  # the latter for what is nested too deeply
            document = None
        if not isinstance(document, dict):
            raise GuestFault(f"the agent at {self._address} answers /metrics with no figures")
        return document

    async def freeze(self) -> None:
        """Have the guest write its filesystems to its disk, and its root filesystem be at rest from then on,
        until this connection is closed or some seconds have passed in the guest.

        Raises:
            GuestFault: the agent does not answer, or could not.
        """
        await self._order("/fsfreeze")

    async def thaw(self) -> None:
        """End that, and return when the guest writes again.

        Raises:
            GuestFault: the agent does not answer. It has its way to thaw without being asked.
        """
        await self.close()
        await self._order("/fsthaw")

    async def _order(self, path: str) -> None:
        try:
            await self._call("POST", path, b"{}")
        except OSError as error:
            raise GuestFault(f"the agent at {self._address} is not reached: {error}") from error

    async def rehearse(self, *, user: str, token: str) -> None:
        """Have a login shell started that does nothing, or what the template has for this: what it takes is
        translated or cached from then on.

        Raises:
            GuestFault, OSError: the agent does not answer. That there is no such shell or user is none.
        """
        message = json.dumps({"process": REHEARSED, "stdin": False}).encode()
        headers = {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode(),
            "X-Access-Token": token,
        }
        try:
            envelope = struct.pack(">BI", 0, len(message)) + message
            await self._call("POST", "/process.Process/Start", envelope, headers)
        except Refused:
            pass

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _call(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] = JSON
    ) -> bytes:
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                if self._streams is None:
                    self._streams = await dial(self._address, self._port, self._dial_every_s)
                status, answer = await _exchange(
                    self._streams, method, path, body, {"Host": self._address, **headers}
                )
        except TimeoutError:
            await self.close()
            raise GuestFault(
                f"the agent at {self._address} did not answer {method} {path} within {CALL_LIMIT_S:g} s"
            ) from None
        except h11.RemoteProtocolError as error:
            await self.close()
            raise GuestFault(f"the agent at {self._address} answers with no HTTP: {error}") from error
        except BaseException:
            await self.close()
            raise
        if not 200 <= status < 300:
            if status == DRIVE_STATUS:
                raise DriveFailed(_message(answer))
            text = answer.decode(errors="replace")[:500]
            raise Refused(f"the agent answers {method} {path} with {status}: {text}")
        return answer


def _message(answer: bytes) -> str:
    """What the body of an error says."""
    try:
        return str(json.loads(answer)["message"])[:_WORDS_LIMIT]
    except (ValueError, TypeError, KeyError, RecursionError):
        return answer.decode(errors="replace")[:_WORDS_LIMIT]


async def dial(address: str, port: int, every_s: tuple[float, float] = DIAL_EVERY_S) -> _Streams:
    """Connect, trying again and again until it succeeds or the caller gives up: first after the one, and
    later after as much as the other number of seconds."""
    connected: asyncio.Future[_Streams] = asyncio.get_running_loop().create_future()
    attempts: set[asyncio.Task[None]] = set()
    pause, longest = every_s
    try:
        while not connected.done():
            attempt = asyncio.create_task(_attempt(address, port, connected, max(DIAL_LIMIT_S, 4 * pause)))
            attempts.add(attempt)
            attempt.add_done_callback(attempts.discard)
            await asyncio.wait({connected}, timeout=pause)
            pause = min(pause * DIAL_GROWTH, longest)
        return connected.result()
    except BaseException:
        if connected.done():
            connected.result()[1].close()
        raise
    finally:
        for attempt in attempts:
            attempt.cancel()


async def _attempt(address: str, port: int, connected: asyncio.Future[_Streams], limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            streams = await asyncio.open_connection(address, port)
    except OSError:  # refused, unreachable, or the time-out: the next attempt is already planned
        return
    if connected.done():
        streams[1].close()
    else:
        connected.set_result(streams)


async def _exchange(
    streams: _Streams, method: str, path: str, body: bytes | None, given: Mapping[str, str]
) -> tuple[int, bytes]:
    """One request and its answer on an open connection."""
    reader, writer = streams
    connection = h11.Connection(h11.CLIENT)
    headers = [*given.items(), ("Content-Length", str(len(body or b"")))]
    parts = [connection.send(h11.Request(method=method, target=path, headers=headers))]
    if body:
        parts.append(connection.send(h11.Data(data=body)))
    connection.send(h11.EndOfMessage())
    writer.write(b"".join(part for part in parts if part))
    status, answer = 0, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(65536)
            if not data and connection.their_state is h11.SEND_RESPONSE:
                raise ConnectionResetError("the connection ended before the answer")
            connection.receive_data(data)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            answer += bytes(event.data)
            if len(answer) > ANSWER_LIMIT_BYTES:
                raise GuestFault(f"the agent's answer to {method} {path} is too long")
        elif isinstance(event, h11.EndOfMessage):
            return status, answer


async def unless_exit(machine: Machine, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, given up when the machine ends first.

    Raises:
        GuestFault: the machine ended; the message says how.
    """
    task = asyncio.create_task(work)
    exit_task = asyncio.create_task(machine.wait())
    try:
        await asyncio.wait({task, exit_task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        ended = exit_task.result()
        raise GuestFault(
            f"machine {machine.spec.id} {ended.reason}: {ended.detail or 'no detail known'};"
            f" last on the console: {last_line(machine.console_tail())}"
        )
    finally:
        for each in (task, exit_task):
            each.cancel()
        await asyncio.gather(task, exit_task, return_exceptions=True)


def last_line(text: str) -> str:
    """The last line that says something, for an error message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "nothing"


def cause(error: BaseException) -> str:
    """An error as the reason kept in a record."""
    if isinstance(error, AenvError):
        return str(error)
    if isinstance(error, asyncio.CancelledError):
        return "the node stopped"
    return f"{type(error).__name__}: {error}"
