"""Ports of a real sandbox, reached through ports here, by the program."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2b import Sandbox

from support.aenv_command import AenvCommand
from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

# Answers with all that it got, once that has ended.
SERVER = """
import socket, threading
def serve(way):
    data = b""
    while piece := way.recv(65536):
        data += piece
    way.sendall(data)
    way.close()
listener = socket.create_server(("127.0.0.1", 7007), backlog=64)
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],)).start()
"""


@pytest.fixture
def aenv(node: RunningNode, tmp_path: Path) -> AenvCommand:
    return AenvCommand(node, tmp_path)


def test_many_connections_to_a_port(aenv: AenvCommand, sandbox_factory: Callable[..., Sandbox]) -> None:
    name = sandbox_factory(network={"allow_public_traffic": False}).sandbox_id
    with (
        aenv.begin("exec", name, "--", "python3", "-c", SERVER) as server,
        aenv.begin("forward", name, "0:7007", "[::1]:0:7008") as command,
    ):
        assert server.stdout is not None and command.stdout is not None and command.stderr is not None
        assert server.stdout.readline() == b"ready\n"
        lines = [command.stdout.readline().decode().split(" -> ") for _ in range(2)]
        assert [line[1] for line in lines] == [f"{name}:7007\n", f"{name}:7008\n"]
        port = int(lines[0][0].rpartition(":")[2])
        with ThreadPoolExecutor(8) as pool:
            pieces = [os.urandom(100_000) for _ in range(16)]
            assert list(pool.map(lambda data: echoed(port, data), pieces)) == pieces
        nobody = int(lines[1][0].rpartition(":")[2])
        with socket.create_connection(("::1", nobody)) as refused, pytest.raises(ConnectionResetError):
            while refused.recv(1):
                pass
        assert b"port 7008: " in command.stderr.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            command.wait(0)
        command.send_signal(signal.SIGINT)
        assert (command.wait(), command.stderr.read()) == (0, b"")
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 143
    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        said = aenv("forward", name, f"{taken.getsockname()[1]}:7007", status=1).stderr
    assert b"Address already in use" in said or b"address already in use" in said


def echoed(port: int, data: bytes) -> bytes:
    """What comes back, after the end of what was sent."""
    with socket.create_connection(("127.0.0.1", port)) as way:
        way.sendall(data)
        way.shutdown(socket.SHUT_WR)
        came = b""
        while piece := way.recv(65536):
            came += piece
    return came
