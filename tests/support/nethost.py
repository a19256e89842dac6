"""A host of its own for network tests: a namespace that stands for it, an internet, and guests.

The test's main thread moves into the stand-in, and the threads that are started from it follow.
Nothing of the real host is touched, and what is left over can be seen exactly.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import selectors
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentenv.config import Settings
from agentenv.network import namespace
from agentenv.network.node import NodeRegistry
from agentenv.network.slot import GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_MAC, Slot
from agentenv.network.slots import Slots
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger

UPLINK_MTU = 1400
WEB = "203.0.113.10"  # a public server
NAMES = "203.0.113.53"  # a public name server
PRIVATE = "10.99.0.1"  # a private host beyond the uplink
METADATA = "169.254.169.254"
HOST6 = "2001:db8::2"
HOST = "198.51.100.2"

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000


def run(*command: str) -> str:
    """The output of a command, which must succeed, in the calling thread's namespace."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@contextmanager
def own_namespace() -> Iterator[None]:
    """Put the calling thread into a new network namespace for a while."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        assert _libc.unshare(_CLONE_NEWNET) == 0
        yield
    finally:
        assert _libc.setns(home, _CLONE_NEWNET) == 0
        os.close(home)


def open_tap(name: str) -> int:
    """A tap of the calling thread's namespace, made if need be, with virtio headers."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    flags = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
    fcntl.ioctl(descriptor, 0x400454CA, struct.pack("16sH22x", name.encode(), flags))  # TUNSETIFF
    return descriptor


def made_place(path: Path, stack: ExitStack) -> Path:
    """A further namespace, at a path that does not exist yet, until the stack ends."""
    path.touch()
    with own_namespace():
        run("mount", "--bind", "/proc/self/ns/net", str(path))
    stack.callback(run, "umount", str(path))
    return path


def listen(
    stack: ExitStack, place: Path | None, address: str, port: int, answer: Callable[[socket.socket], None]
) -> int:
    """Serve TCP connections to a place one after another, until the stack ends; returns the port."""
    with ExitStack() as there:
        if place is not None:
            there.enter_context(namespace.inside(place))
        listener = socket.create_server((address, port), family=_family(address))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                answer(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(listener.close)
    stack.callback(listener.shutdown, socket.SHUT_RDWR)
    found: int = listener.getsockname()[1]
    return found


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class NetHost:
    """The stand-in host, with `eth0` towards an internet in another namespace."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.stack = stack
        self.namespaces = directory / "netns"
        self.namespaces.mkdir()
        self._places: dict[str, Path] = {}
        run("ip", "link", "set", "lo", "up")
        self.internet = self.place("internet")
        run("ip", "link", "add", "eth0", "mtu", str(UPLINK_MTU), "type", "veth", "peer", "name", "far")
        # The far end does not know of the smaller MTU, as is the rule beyond an uplink.
        run("ip", "link", "set", "far", "netns", str(self.internet), "mtu", "1500", "up")
        run("ip", "addr", "add", f"{HOST}/24", "dev", "eth0")
        run("ip", "link", "set", "eth0", "up")
        with namespace.inside(self.internet):
            run("ip", "link", "set", "lo", "up")
            run("ip", "addr", "add", "198.51.100.1/24", "dev", "far")
            for address in (WEB, NAMES, PRIVATE, METADATA):
                run("ip", "addr", "add", f"{address}/32", "dev", "lo")
        run("ip", "route", "add", "default", "via", "198.51.100.1")

    def add_ipv6(self, *addresses: str) -> None:
        """Give the host and its internet IPv6, and the internet these addresses."""
        run("ip", "addr", "add", f"{HOST6}/64", "dev", "eth0", "nodad")
        with namespace.inside(self.internet):
            run("ip", "addr", "add", "2001:db8::1/64", "dev", "far", "nodad")
            for address in addresses:
                run("ip", "addr", "add", f"{address}/128", "dev", "lo", "nodad")
        run("ip", "route", "add", "default", "via", "2001:db8::1")

    def place(self, name: str) -> Path:
        """A further namespace, outside the directory that slots use."""
        return made_place(self.directory / f"place-{name}", self.stack)

    def state(self) -> dict[str, Any]:
        """Everything that slots could leave behind."""
        devices = Path("/proc/sys/net/ipv4/conf")
        return {
            "links": sorted(line.split()[0] for line in run("ip", "-br", "link").splitlines()),
            "addresses": run("ip", "-4", "-br", "addr"),
            "routes": run("ip", "-4", "route", "show", "table", "all"),
            "rules": run("nft", "--stateless", "list", "ruleset"),
            "forwarding": {
                file.parent.name: file.read_text() for file in sorted(devices.glob("*/forwarding"))
            },
            "namespaces": sorted(file.name for file in self.namespaces.iterdir()),
            "mounts": [
                line
                for line in Path("/proc/self/mounts").read_text().splitlines()
                if str(self.namespaces) in line
            ],
        }

    def listen(
        self, place: Path | None, address: str, port: int, answer: Callable[[socket.socket], None]
    ) -> int:
        """Serve TCP connections one after another with `answer`; returns the port."""
        return listen(self.stack, place, address, port, answer)

    def guest(self, slot: Slot) -> Path:
        """A namespace that stands for the guest on a slot's tap, with the network stack of one.

        Its device has an MTU of 1500, as a guest that knows nothing of the host's.
        """
        place = self.place(f"guest-{slot.name}-{slot.lease}")
        with namespace.inside(slot.namespace):
            tap = open_tap(slot.tap)
        with namespace.inside(place):
            device = open_tap("eth0")
            Path("/proc/sys/net/ipv6/conf/eth0/disable_ipv6").write_text("1")
            run("ip", "link", "set", "lo", "up")
            run("ip", "link", "set", "eth0", "address", GUEST_MAC, "up")
            run("ip", "addr", "add", f"{GUEST_ADDRESS}/30", "dev", "eth0")
            run("ip", "route", "add", "default", "via", GATEWAY_ADDRESS)
        self._relay(tap, device)
        return place

    def _relay(self, one: int, other: int) -> None:
        """Carry frames, with their virtio headers, between two taps until the test ends."""
        wake, woken = os.pipe()

        def carry() -> None:
            with selectors.DefaultSelector() as selector:
                for source, target in ((one, other), (other, one), (wake, -1)):
                    selector.register(source, selectors.EVENT_READ, target)
                while True:
                    for key, _ in selector.select():
                        if key.data < 0:
                            return
                        try:
                            frame = os.read(key.fd, 70_000)
                        except OSError:
                            return  # the slot has gone
                        try:
                            os.write(key.data, frame)
                        except OSError:
                            continue  # a device that is down takes no frame: it is lost, as on a wire

        thread = threading.Thread(target=carry, daemon=True)
        thread.start()

        def end() -> None:
            os.close(woken)
            thread.join()
            for descriptor in (one, other, wake):
                os.close(descriptor)

        self.stack.callback(end)


@contextmanager
def net_host(directory: Path) -> Iterator[NetHost]:
    """A stand-in host for the calling thread and those it starts."""
    with ExitStack() as stack:
        stack.enter_context(own_namespace())
        made = NetHost(directory, stack)
        stack.callback(_unmount_all, made.namespaces)
        yield made


def _unmount_all(directory: Path) -> None:
    """Let go of what a failed test left mounted, or its directory could not be removed."""
    for file in directory.iterdir():
        subprocess.run(["umount", str(file)], capture_output=True, check=False)


def connect(place: Path | None, address: str, port: int, *, source: str | None = None) -> socket.socket:
    """A TCP connection from a place (None: the host), within 2 s."""
    with ExitStack() as there:
        if place is not None:
            there.enter_context(namespace.inside(place))
        connection = socket.socket(_family(address))
    try:
        connection.settimeout(2)
        if source is not None:
            connection.bind((source, 0))
        connection.connect((address, port))
    except BaseException:
        connection.close()
        raise
    return connection


def datagram(place: Path, timeout: float = 5) -> socket.socket:
    """A UDP socket in a place."""
    with namespace.inside(place):
        found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    found.settimeout(timeout)
    return found


class NetNode:
    """A node's network with a home and a ledger of its own."""

    def __init__(self, host: NetHost, name: str = "one", **more: object) -> None:
        self.home = host.directory / name
        self.home.mkdir(exist_ok=True)
        self.settings = Settings(home=self.home, **more)  # type: ignore[arg-type]
        self.registry = NodeRegistry(host.directory / "nodes")
        self.database = Database(self.home / "aenv.db")
        self.ledger = Ledger(self.database)
        host.stack.callback(self.database.close)

    def slots(self, **more: object) -> Slots:
        return Slots(self.settings, self.ledger, registry=self.registry, **more)  # type: ignore[arg-type]


async def exchange(connection: socket.socket) -> bytes:
    def read() -> bytes:
        with connection:
            connection.sendall(b"?")
            return b"".join(iter(lambda: connection.recv(65536), b""))

    return await asyncio.to_thread(read)


async def reached(place: Path | None, address: str, port: int) -> bytes:
    """What a server says to a connection from a place."""
    return await exchange(await asyncio.to_thread(connect, place, address, port))


async def refusal(place: Path | None, address: str, port: int) -> OSError:
    with pytest.raises(OSError) as caught:
        await asyncio.to_thread(connect, place, address, port)
    return caught.value


def saying(text: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(1)
        connection.sendall(text)

    return answer


def peer(connection: socket.socket) -> None:
    """Answers with the address that the connection comes from."""
    connection.recv(1)
    connection.sendall(connection.getpeername()[0].encode())
