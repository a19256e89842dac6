"""Services that listen on the loopback address alone become reachable at the machine's own.

E2B's envd looks through the listening sockets every second. Here the host asks, when a connection to a
port was refused: `POST /forward {"port": 3000}`. If something listens on that port at 127.0.0.1 or ::1,
the agent listens there on the machine's address and relays; 204 says that connecting again makes sense,
404 that nothing listens. The relay's listener goes away when it was not used for some seconds, so that it
is not in the way of a service that later wants the port on every address.
"""

from __future__ import annotations

import errno
import os

from agentenv.guest import loop
from agentenv.guest.connect import ConnectError, int_field, parse_message
from agentenv.guest.http import HttpError, Response
from agentenv.guest.init import refuse_strangers
from agentenv.guest.lean import accept, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentenv.guest.context import Context
    from agentenv.guest.http import Request, Router

IDLE_SECONDS = 5.0
_LISTEN = "0A"
_ANY = ("00000000", "00000000000000000000000000000000")
_LOOPBACK_6 = "00000000000000000000000001000000"
_READ = 64 * 1024


def register(router: Router, context: Context) -> None:
    """Adds /forward."""
    forwards: dict[int, Forward] = {}

    async def forward(request: Request) -> Response:
        refuse_strangers(context, request)
        try:
            port = int_field(parse_message(await request.read(1024)), "port")
        except ConnectError as error:
            raise HttpError(400, error.message) from None
        if not 0 < port < 65536:
            raise HttpError(400, f"{port} is not a port")
        target = find_listener(port)
        if target is None:
            raise HttpError(404, f"nothing listens on port {port}")
        if target and port not in forwards:
            try:
                forwards[port] = Forward(_own_address(context.gateway), port, target, forwards)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:  # in use: then it can be reached as it is
                    raise HttpError(500, f"cannot listen on port {port}: {error.strerror}") from error
        return Response(204)

    router.add("POST", "/forward", forward)


class Forward:
    """Listens on `address` and relays to `target` on the same port; is in `registry` while it does."""

    def __init__(self, address: str, port: int, target: str, registry: dict[int, Forward]) -> None:
        self._port = port
        self._target = target
        self._registry = registry
        self._connections = 0
        self._idle: loop.Timer | None = None
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.setblocking(False)
            self._listener.bind((address, port))
            self._listener.listen(128)
        except BaseException:
            self._listener.close()
            raise
        self._accepting = loop.spawn(self._accept())
        loop.watch(self._listener.fileno(), lambda _events: self._accepting.wake())
        self._rest()

    def close(self) -> None:
        """Stops listening; what is being relayed goes on."""
        if self._registry.get(self._port) is self:
            del self._registry[self._port]
            loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._accepting.cancel()
        if self._idle is not None:
            self._idle.cancel()

    def _rest(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = None if self._connections else loop.call_later(IDLE_SECONDS, self.close)

    async def _accept(self) -> None:
        while True:
            try:
                fd, _peer = accept(self._listener)
            except BlockingIOError:
                await loop.SUSPEND
                continue
            self._connections += 1
            self._rest()
            loop.spawn(self._relay(Endpoint(socket.socket(fileno=fd))))

    async def _relay(self, near: Endpoint) -> None:
        family = socket.AF_INET6 if ":" in self._target else socket.AF_INET
        far = Endpoint(socket.socket(family, socket.SOCK_STREAM))
        try:
            if await far.connect(self._target, self._port):
                back = loop.spawn(pump(far, near))
                await pump(near, far)
                await back.join()
            else:
                self.close()  # the service is gone: from now on connections are refused again
        finally:
            near.close()
            far.close()
            self._connections -= 1
            if self._registry.get(self._port) is self:
                self._rest()


class Endpoint:
    """One side of a relayed connection: one task reads from it, another writes to it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        # Else the second part of an answer waits until the first was acknowledged, which takes 40 ms.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.fd = connection.fileno()
        self._waiting: list[loop.Task] = []
        loop.watch(self.fd, self._on_events)

    async def connect(self, address: str, port: int) -> bool:
        """Whether somebody listens there."""
        result = self._socket.connect_ex((address, port))
        while result == errno.EINPROGRESS:
            await self.ready()
            result = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if result == 0 and not _connected(self._socket):
                result = errno.EINPROGRESS
        return result == 0

    async def ready(self) -> None:
        """Waits for the next change of the socket."""
        task = loop.current()
        self._waiting.append(task)
        try:
            await loop.SUSPEND
        finally:
            self._waiting.remove(task)

    def _on_events(self, _events: int) -> None:
        for task in self._waiting:
            task.wake()

    def finish(self) -> None:
        """Nothing more will be written."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # the other side is gone already
            pass

    def close(self) -> None:
        loop.unwatch(self.fd)
        self._socket.close()


async def pump(source: Endpoint, sink: Endpoint) -> None:
    """Copies until `source` ends or either breaks; then `sink` is told."""
    try:
        while True:
            try:
                data = os.read(source.fd, _READ)
            except BlockingIOError:
                await source.ready()
                continue
            if not data:
                break
            view = memoryview(data)
            while len(view):
                try:
                    view = view[os.write(sink.fd, view) :]
                except BlockingIOError:
                    await sink.ready()
    except OSError:  # one side broke; the other learns of it as an end
        source.finish()
    sink.finish()


def find_listener(port: int) -> str | None:
    """Where something listens on `port`: "127.0.0.1" or "::1", "" for every address, None for nowhere."""
    found: str | None = None
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read()
        except FileNotFoundError:  # no such protocol in this kernel
            continue
        address = listener_in(text, port)
        if address == "":
            return ""
        found = found or address
    return found


def listener_in(table: str, port: int) -> str | None:
    """The same, of one table of the kernel's (proc(5), /proc/net/tcp)."""
    found: str | None = None
    suffix = f":{port:04X}"
    for line in table.split("\n")[1:]:
        fields = line.split(None, 4)
        if len(fields) < 4 or fields[3] != _LISTEN or not fields[1].endswith(suffix):
            continue
        address = fields[1][: -len(suffix)]
        if address in _ANY:
            return ""
        if address == _LOOPBACK_6:
            found = found or "::1"
        elif address.endswith("7F") and len(address) == 8:  # the address is little-endian: 127.x.y.z
            number = bytes.fromhex(address)[::-1]
            found = ".".join(str(part) for part in number)
    return found


def _connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def _own_address(gateway: str) -> str:
    """The address of this machine that the gateway sees."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        probe.connect((gateway, 9))  # sends nothing
        return str(probe.getsockname()[0])
    finally:
        probe.close()
