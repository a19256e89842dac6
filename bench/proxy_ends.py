"""What `bench/proxy.py` measures, each in a process: the stand-in for a guest, the data plane, nginx.

The data plane is the node's own, with a table of sandboxes in the place of the service's.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

TOKEN = "t" * 32
SANDBOXES = 16
ANSWER_SIZE = 1024
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n" % ANSWER_SIZE
    + b"x" * ANSWER_SIZE
)
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
BLOCK = b"y" * (1 << 20)

_NGINX = """
daemon off; master_process off; worker_processes 1; pid {directory}/pid; error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
    access_log off; client_max_body_size 0; keepalive_requests 100000000;
    proxy_request_buffering off; proxy_buffering off; proxy_http_version 1.1; proxy_set_header Connection "";
    client_body_temp_path {directory}/a; proxy_temp_path {directory}/b; fastcgi_temp_path {directory}/c;
    uwsgi_temp_path {directory}/d; scgi_temp_path {directory}/e;
    upstream guest {{ server 127.0.0.1:{guest}; keepalive 64; keepalive_requests 100000000; }}
    server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://guest; }} }}
}}
"""


class Guest(asyncio.Protocol):
    """Answers GET with 1 KiB, `GET /N` with N MiB, POST after its body, and echoes after an upgrade."""

    def __init__(self) -> None:
        self.transport = cast(asyncio.Transport, None)
        self.upload = 0
        self.blocks = 0
        self.echoes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.echoes:
            self.transport.write(data)
        elif self.upload:
            self.took(len(data))
        elif data.startswith(b"GET / "):
            self.transport.write(ANSWER * data.count(b"\r\n\r\n"))
        elif data.startswith(b"GET /echo "):
            self.echoes = True
            self.transport.write(SWITCHED)
        elif data.startswith(b"GET /"):
            self.blocks = int(data[5 : data.index(b" ", 5)])
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (self.blocks << 20))
            self.resume_writing()
        else:
            head, _, body = data.partition(b"\r\n\r\n")
            at = head.lower().index(b"content-length:") + 15
            self.upload = int(head[at:].split(b"\r\n", 1)[0])
            self.took(len(body))

    def took(self, size: int) -> None:
        self.upload -= size
        if self.upload == 0:
            self.transport.write(ANSWER)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        while self.blocks and not self.paused:
            self.blocks -= 1
            self.transport.write(BLOCK)


async def serve_guest() -> None:
    server = await asyncio.get_running_loop().create_server(Guest, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def serve_proxy(certificate: str | None) -> None:
    """The data plane.

    Args:
        certificate: a file with a certificate and its key, to speak TLS.
    """
    import uvicorn

    from agentenv.config import Settings
    from agentenv.node import uvicorn_config
    from agentenv.proxy.directory import Route
    from agentenv.proxy.front import front_protocol

    routes = {f"box{n}": Route(f"box{n}", 1, "127.0.0.1", "a", TOKEN, False) for n in range(SANDBOXES)}

    class Sandboxes:
        def route(self, sandbox_id: str) -> Route | None:
            return routes.get(sandbox_id)

        def asleep(self, _: str) -> None:
            return None

        def guard(self, _: str) -> None:
            return None

        async def wake(self, sandbox_id: str) -> None:
            raise AssertionError(f"{sandbox_id} does not sleep")

        def by_signature(self, *_: object) -> Route | None:
            return None

    async def api(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("the load goes to sandboxes only")

    config = uvicorn_config(api, front_protocol(Sandboxes(), Settings()))
    config.port = 0
    config.ssl_certfile = certificate
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving


@dataclass
class Running:
    """A process that listens at 127.0.0.1."""

    port: int
    pid: int

    def cpu_s(self) -> float:
        """Processor time that it has used, to the nanosecond."""
        return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0]) / 1e9

    def resident_bytes(self) -> int:
        """Its memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@contextmanager
def running(role: list[str], cores: set[int]) -> Iterator[Running]:
    """`proxy.py` in another role, on these cores."""
    command = [sys.executable, str(Path(__file__).with_name("proxy.py")), "--role", *role]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        os.sched_setaffinity(child.pid, cores)
        try:
            assert child.stdout is not None
            yield Running(int(child.stdout.readline()), child.pid)
        finally:
            child.terminate()


def find_nginx(directory: Path) -> str | None:
    """The program: the host's, or that of the distribution's package, unpacked here and not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if shutil.which("nginx", path=path):
        return shutil.which("nginx", path=path)
    subprocess.run(["apt-get", "-qq", "download", "nginx"], cwd=directory, check=False, stdout=sys.stderr)
    for package in directory.glob("nginx_*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, directory], check=True)
    return shutil.which("nginx", path=str(directory / "usr/sbin"))


@contextmanager
def nginx(program: str, directory: Path, guest_port: int, cores: set[int]) -> Iterator[Running]:
    """One worker of nginx, which relays everything to the guest; it neither routes nor asks who may."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    file = directory / "nginx.conf"
    file.write_text(_NGINX.format(directory=directory, guest=guest_port, port=port))
    with subprocess.Popen([program, "-p", str(directory), "-c", str(file), "-e", "stderr"]) as child:
        os.sched_setaffinity(child.pid, cores)
        try:
            _wait_for(child, port)
            yield Running(port, child.pid)
        finally:
            child.terminate()


def _wait_for(child: subprocess.Popen[bytes], port: int) -> None:
    """Return when it accepts connections. It has no way to say so by itself."""
    while child.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return
    raise SystemExit("nginx did not start")


def make_certificate(directory: Path) -> Path:
    """A certificate for a test's TLS, with its key, in one file."""
    file = directory / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-keyout", str(file), "-out", str(directory / "public.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    with file.open("a") as both:
        both.write((directory / "public.pem").read_text())
    return file


def trusting_all() -> ssl.SSLContext:
    """What a client of the bench needs: whose certificate it is does not matter."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
