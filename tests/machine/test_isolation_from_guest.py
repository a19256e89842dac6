"""What the root of a guest reaches and sees, probed: promises of docs/explanation/security.md."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from e2b import Sandbox

from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

# Tries what it is told as root, and says what came of each.
PROBE = """
import json, os, socket, sys

def tcp(address, port):
    with socket.create_connection((address, port), 3):
        return "reached"

def udp(address, port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(0.5)
        client.connect((address, port))
        client.send(b"?")
        return client.recv(100) and "answered"

def vsock(cid, port):
    with socket.socket(socket.AF_VSOCK) as client:
        client.connect((cid, port))
        return "reached"

def find(*words):
    return sorted(name for name in os.listdir(words[0]) if not words[1:] or name.startswith(words[1:]))

def text(path):
    return open(path).read()

def tried(name, arguments):
    try:
        return globals()[name](*arguments)
    except OSError as error:
        return type(error).__name__

print(json.dumps([tried(name, arguments) for name, *arguments in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def tenant(node: RunningNode) -> Iterator[Sandbox]:
    sandbox = node.sandbox("base")
    sandbox.files.write("/tmp/probe.py", PROBE)
    yield sandbox
    sandbox.kill()


@pytest.fixture
def probe(tenant: Sandbox) -> Callable[..., list[Any]]:
    def ask(*questions: tuple[object, ...]) -> list[Any]:
        words = json.dumps(questions).replace("'", "")
        said = tenant.commands.run(f"python3 /tmp/probe.py '{words}'", user="root", timeout=60).stdout
        found: list[Any] = json.loads(said)
        return found

    return ask


@pytest.fixture
def on_host() -> Iterator[tuple[int, int]]:
    """Ports of services on all addresses of the host: of streams and of datagrams."""
    with (
        socket.create_server(("0.0.0.0", 0)) as streams,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind(("0.0.0.0", 0))
        yield streams.getsockname()[1], datagrams.getsockname()[1]


def test_neither_the_host_nor_its_node_is_reached(
    probe: Callable[..., list[Any]], node: RunningNode, on_host: tuple[int, int], host_addresses: list[str]
) -> None:
    streams, datagrams = on_host
    api = int(node.url.rpartition(":")[2])
    questions = [
        question
        for address in (*host_addresses, "169.254.0.22", "169.254.169.254", "10.0.0.1")
        for question in (("tcp", address, streams), ("tcp", address, api), ("udp", address, datagrams))
    ]
    found = probe(*questions, ("tcp", "127.0.0.1", 49983), ("tcp", "169.254.0.22", 53))
    assert {answer for answer in found[:-2] if answer in ("reached", "answered")} == set()
    assert found[-2:] == ["reached", "reached"]  # its agent and the resolver: the probe itself works


@pytest.fixture
def host_addresses() -> list[str]:
    """Those at which this host's own services listen, and by which it reaches others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.1", 9))
        except OSError:  # no way out
            return []
        return [route.getsockname()[0]]


def test_the_devices_are_those_that_are_needed(probe: Callable[..., list[Any]]) -> None:
    pci, virtio, usb, vsock, tpm, ports = probe(
        ("find", "/sys/bus/pci/devices"),
        ("find", "/sys/bus/virtio/devices"),
        ("find", "/sys/bus/usb/devices"),
        ("vsock", 2, 1024),
        ("find", "/sys/class/tpm"),
        ("text", "/proc/tty/driver/serial"),
    )
    assert pci in ([], "FileNotFoundError")
    assert usb in ([], "FileNotFoundError")
    assert tpm in ([], "FileNotFoundError")
    assert vsock == "OSError"
    # Root disk, tools, four places for drives, and the network.
    assert len(virtio) == 7
    assert sum("16550A" in line for line in ports.splitlines()) == 1


def test_nothing_of_the_host_is_told(probe: Callable[..., list[Any]], node: RunningNode) -> None:
    line, disks = probe(("text", "/proc/cmdline"), ("text", "/proc/partitions"))
    assert str(node.home) not in line
    assert socket.gethostname() not in line
    assert disks
