"""Traffic of real sandboxes: forwarded ports, waking, signed files, and limits, as clients see them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from e2b import Sandbox

from agentenv.records.database import Database
from agentenv.sandbox.records import decode
from support.running import RunningNode

pytestmark = pytest.mark.machine

KIB, MIB = 1 << 10, 1 << 20

PORTS = {"0.0.0.0": 7001, "127.0.0.1": 7002, "::1": 7003}

# Answers with what it got, backwards, once the client has ended its half.
ECHO = """
import socket, sys, threading
def serve(address, port):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, int(port)), family=family)
    while True:
        connection, _ = server.accept()
        got = b"".join(iter(lambda: connection.recv(65536), b""))
        connection.sendall(got[::-1])
        connection.close()
for each in sys.argv[1:]:
    threading.Thread(target=serve, args=each.split(",")).start()
print("listening", flush=True)
"""


@pytest.fixture
def make(node: RunningNode, host_audit: None) -> Iterator[Callable[..., Sandbox]]:
    made: list[Sandbox] = []

    def factory(**given: Any) -> Sandbox:
        access: dict[str, Any] = {"api_url": node.url, "sandbox_url": node.url, "api_key": node.key}
        made.append(Sandbox.create("base", timeout=600, request_timeout=120, **access, **given))
        return made[-1]

    yield factory
    for each in made:
        each.kill()


def forward(node: RunningNode, sandbox: Sandbox, port: int) -> socket.socket:
    """A connection to a port of a sandbox."""
    url = urlsplit(node.url)
    connection = socket.create_connection((url.hostname, url.port or 80), timeout=60)
    connection.sendall(
        f"GET /sandboxes/{sandbox.sandbox_id}/forward?port={port} HTTP/1.1\r\nHost: {url.netloc}\r\n"
        f"Connection: Upgrade\r\nUpgrade: tcp\r\nX-API-KEY: {node.key}\r\n\r\n".encode()
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    assert head.startswith(b"HTTP/1.1 101 "), head
    return connection


def reversed_by(connection: socket.socket, data: bytes) -> bytes:
    with connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def generation(node: RunningNode, sandbox: Sandbox) -> int:
    database = Database(node.home / "aenv.db")
    try:
        rows = database.query("SELECT document FROM sandboxes WHERE id = ?", (sandbox.sandbox_id,))
        return decode(rows[0]["document"]).generation
    finally:
        database.close()


def test_ports_are_forwarded_also_those_of_the_loopback_address_and_of_one_that_sleeps(
    node: RunningNode, make: Callable[..., Sandbox]
) -> None:
    sandbox = make(lifecycle={"on_timeout": "pause", "auto_resume": True})
    sandbox.files.write("/tmp/echo.py", ECHO)
    places = " ".join(f"{address},{port}" for address, port in PORTS.items())
    command = sandbox.commands.run(f"python3 /tmp/echo.py {places}", background=True, timeout=0)
    assert next(iter(command))[0] == "listening\n"
    data = bytes(range(256)) * 400
    for port in PORTS.values():
        assert reversed_by(forward(node, sandbox, port), data) == data[::-1]
    sandbox.pause()
    assert reversed_by(forward(node, sandbox, 7001), b"awake") == b"ekawa"
    assert generation(node, sandbox) == 2
    connection = forward(node, sandbox, 7001)
    sandbox.kill()
    with connection, pytest.raises(ConnectionResetError):
        connection.recv(1)


def test_many_requests_at_once_wake_it_once_and_signed_urls_do_too(
    node: RunningNode, make: Callable[..., Sandbox]
) -> None:
    sandbox = make(lifecycle={"on_timeout": "pause", "auto_resume": True})
    sandbox.files.write("/home/user/signed.txt", "signed")
    url = sandbox.download_url("signed.txt", user="user", use_signature_expiration=600)
    upload = sandbox.upload_url("/tmp/many.txt")
    by_host = {"Host": f"49983-{sandbox.sandbox_id}.localhost"}
    sandbox.pause()

    def get(number: int) -> tuple[int, str]:
        headers = by_host if number % 2 else {}
        answer = httpx.get(url, headers=headers, trust_env=False, timeout=60)
        return answer.status_code, answer.text

    with ThreadPoolExecutor(20) as threads:
        assert set(threads.map(get, range(20))) == {(200, "signed")}
    assert generation(node, sandbox) == 2
    sandbox.pause()
    body = bytes(range(256)) * 4 * KIB
    put = httpx.post(upload, files={"file": ("many.txt", body)}, trust_env=False, timeout=60)
    assert put.status_code == 200
    assert sandbox.files.read("/tmp/many.txt", format="bytes") == body
    past = sandbox.download_url("signed.txt", use_signature_expiration=1)
    other = url.replace("signed.txt", "other.txt")
    time.sleep(2)  # the signature counts whole seconds
    for headers in ({}, by_host):
        assert httpx.get(past, headers=headers, trust_env=False).status_code == 401
        assert httpx.get(other, headers=headers, trust_env=False).status_code == 401


def test_limits_are_asked_for_shown_and_kept_to(node: RunningNode, make: Callable[..., Sandbox]) -> None:
    sandbox = make()
    sandbox.commands.run(f"head -c {MIB} /dev/zero > /tmp/data")
    limits = {
        "network": {"txBytesPerSecond": MIB, "burstBytes": 64 * KIB},
        "disk": {"bytesPerSecond": 2 * MIB},
    }
    path = f"/sandboxes/{sandbox.sandbox_id}"
    with node.client() as client:
        assert client.put(f"{path}/limits", json=limits).status_code == 204
        assert client.get(path).json()["limits"] == limits
        started = time.monotonic()
        assert len(sandbox.files.read("/tmp/data", format="bytes")) == MIB
        assert time.monotonic() - started >= (MIB - 64 * KIB) / MIB
        sandbox.pause()
        sandbox.connect(timeout=600)
        assert client.get(path).json()["limits"] == limits
        queues = "for queue in /sys/block/vd*/queue; do echo 4 > $queue/max_sectors_kb; done"
        sandbox.commands.run(queues, user="root")
        started = time.monotonic()
        sandbox.commands.run("dd if=/dev/zero of=/home/user/file bs=64k count=64 conv=fsync")
        # By the bucket's own arithmetic: a tenth of a second's worth goes at once, QEMU makes 32 writes one.
        assert time.monotonic() - started >= (4 * MIB - 2 * MIB / 10 - 32 * 4 * KIB) / (2 * MIB)
        assert client.put(f"{path}/limits", json={"disk": {"iops": 1}}).status_code == 400
