"""How much the data plane carries: requests, latency and bodies, through it and beside it.

A server in the host's namespace stands in for a guest. The proxy has one core to itself and routes
and authorises each request; the server and the load share the others. Every part is bounded in
time or count. With `--json`, one object is printed; without, the same as lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any, cast

import uvloop

TOKEN = "t" * 32
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: 1024\r\n\r\n" + b"x" * 1024
)
BLOCK = b"y" * (1 << 20)


class Guest(asyncio.Protocol):
    """Answers GET with 1 KiB, `GET /N` with N MiB, and POST when the body has come."""

    def __init__(self) -> None:
        self.transport = cast(asyncio.Transport, None)
        self.upload = 0
        self.blocks = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.upload:
            self.took(len(data))
        elif data.startswith(b"GET / "):
            self.transport.write(ANSWER * data.count(b"\r\n\r\n"))
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
    server = await asyncio.get_running_loop().create_server(Guest, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def serve_proxy() -> None:
    import uvicorn

    from agentenv.config import Settings
    from agentenv.proxy.directory import Route
    from agentenv.proxy.front import front_protocol

    routes = {f"box{n}": Route(f"box{n}", 1, "127.0.0.1", "a", TOKEN, False) for n in range(16)}

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

    config = uvicorn.Config(
        api, port=0, http=front_protocol(Sandboxes(), Settings()), lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving


@dataclass
class Way:
    """A way to the guest: where to connect, and what each head carries.

    A varied way's heads differ from one request of a connection to the next.
    """

    name: str
    port: int
    pid: int
    fields: str
    varied: bool = False

    def heads(self, start: str, number: int) -> list[bytes]:
        """What a connection sends in turn."""
        head = self.head(start, number)
        return [head, head.replace(b"bench", b"Bench")] if self.varied else [head]

    def head(self, start: str, number: int = 0) -> bytes:
        """A head as an SDK sends it."""
        return (
            f"{start} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAccept: */*\r\n"
            f"Accept-Encoding: gzip, deflate\r\nUser-Agent: bench\r\n"
            f"X-Access-Token: {TOKEN}\r\n{self.fields.format(n=number % 16)}\r\n"
        ).encode()

    def cpu_s(self) -> float:
        """Processor time that the process has used."""
        with open(f"/proc/{self.pid}/stat") as file:
            values = file.read().rpartition(")")[2].split()
        return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


class Caller(asyncio.Protocol):
    """One keep-alive connection that has one request out at a time."""

    def __init__(self, load: Load, requests: list[bytes]) -> None:
        self.load, self.requests = load, cycle(requests)
        self.transport = cast(asyncio.Transport, None)
        self.got = self.due = 0.0
        self.size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, due: float) -> None:
        self.due, self.got = due, 0
        self.transport.write(next(self.requests))

    def data_received(self, data: bytes) -> None:
        if not self.got:
            if not data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"unexpected answer: {data[:200]!r}")
            self.size = data.index(b"\r\n\r\n") + 4 + 1024
        self.got += len(data)
        if self.got >= self.size:
            self.load.answered(self)


class Load:
    """Many callers: as fast as answers come, or at a fixed rate."""

    def __init__(self) -> None:
        self.count = 0
        self.latencies: list[float] = []
        self.closed_loop = True
        self.running = True
        self.idle: deque[Caller] = deque()
        self.late: deque[float] = deque()

    def answered(self, caller: Caller) -> None:
        now = time.perf_counter()
        self.count += 1
        if not self.running:
            return
        if self.closed_loop:
            caller.send(now)
            return
        self.latencies.append(now - caller.due)
        if self.late:
            caller.send(self.late.popleft())
        else:
            self.idle.append(caller)


async def connect_callers(load: Load, way: Way, connections: int) -> list[Caller]:
    loop = asyncio.get_running_loop()
    callers = []
    for number in range(connections):
        requests = way.heads("GET /", number)
        _, caller = await loop.create_connection(lambda r=requests: Caller(load, r), "127.0.0.1", way.port)  # type: ignore[misc]
        callers.append(caller)
    return callers


async def most_requests(way: Way, connections: int, seconds: float) -> dict[str, float]:
    """Requests per second, each connection sending when it got its answer."""
    load = Load()
    callers = await connect_callers(load, way, connections)
    for caller in callers:
        caller.send(0)
    await asyncio.sleep(0.5)
    count, cpu, start = load.count, way.cpu_s(), time.perf_counter()
    await asyncio.sleep(seconds)
    count, cpu, took = load.count - count, way.cpu_s() - cpu, time.perf_counter() - start
    load.running = False
    for caller in callers:
        caller.transport.abort()
    return {
        "requests_per_second": round(count / took),
        "cpu_us_per_request": round(cpu / count * 1e6, 1),
    }


async def latency_at(way: Way, connections: int, rate: float, seconds: float) -> float:
    """The 99th percentile in ms, from when a request was due, at a fixed rate."""
    load = Load()
    load.closed_loop = False
    callers = await connect_callers(load, way, connections)
    load.idle.extend(callers)
    start = time.perf_counter()
    due = start
    while (now := time.perf_counter()) < start + seconds:
        while due <= now:
            if load.idle:
                load.idle.popleft().send(due)
            else:
                load.late.append(due)
            due += 1 / rate
        await asyncio.sleep(0.0005)
    load.running = False
    for caller in callers:
        caller.transport.abort()
    return round(sorted(load.latencies)[int(len(load.latencies) * 0.99)] * 1e3, 2)


def upload(way: Way, mib: int) -> float:
    """MB/s of one body to the guest."""
    with socket.create_connection(("127.0.0.1", way.port)) as sock:
        start = time.perf_counter()
        sock.sendall(way.head("POST /").replace(b"\r\n\r\n", b"\r\nContent-Length: %d\r\n\r\n" % (mib << 20)))
        for _ in range(mib):
            sock.sendall(BLOCK)
        if not sock.recv(64).startswith(b"HTTP/1.1 200"):
            raise SystemExit("the upload was refused")
        return round((mib << 20) / (time.perf_counter() - start) / 1e6, 1)


def download(way: Way, mib: int) -> float:
    """MB/s of one body from the guest."""
    buffer = bytearray(1 << 20)
    with socket.create_connection(("127.0.0.1", way.port)) as sock:
        start = time.perf_counter()
        sock.sendall(way.head(f"GET /{mib}"))
        left = mib << 20
        while left > 0:
            size = sock.recv_into(buffer)
            if size == 0:
                raise SystemExit("the download broke off")
            left -= size
        return round((mib << 20) / (time.perf_counter() - start) / 1e6, 1)


@asynccontextmanager
async def process(role: str, cores: set[int]) -> AsyncIterator[tuple[int, int]]:
    """Run this file in another role; gives its port and pid."""
    child = subprocess.Popen([sys.executable, __file__, "--role", role], stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(child.pid, cores)
    try:
        assert child.stdout is not None
        yield int(child.stdout.readline()), child.pid
    finally:
        child.terminate()
        child.wait(10)
        if child.stdout is not None:
            child.stdout.close()


async def measure(way: Way, options: argparse.Namespace) -> dict[str, float]:
    result = await most_requests(way, options.connections, options.seconds)
    rate = min(result["requests_per_second"], options.rate_limit) / 2
    result["p99_ms_at_half"] = await latency_at(way, options.connections, rate, options.seconds)
    result["upload_mb_s"] = await asyncio.to_thread(upload, way, options.mib)
    result["download_mb_s"] = await asyncio.to_thread(download, way, options.mib)
    return result


async def run(options: argparse.Namespace) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    first, rest = {cores[0]}, set(cores[1:]) or {cores[0]}
    async with AsyncExitStack() as stack:
        guest_port, guest_pid = await stack.enter_async_context(process("guest", rest))
        proxy_port, proxy_pid = await stack.enter_async_context(process("proxy", first))
        os.sched_setaffinity(0, rest)
        routing = (
            f"E2b-Sandbox-Id: box{{n}}\r\nE2b-Sandbox-Port: {guest_port}\r\n"
            f"E2b-Traffic-Access-Token: {TOKEN}\r\n"
        )
        way = Way("proxy", proxy_port, proxy_pid, routing, options.varied)
        result: dict[str, Any] = await measure(way, options)
        result["direct"] = await measure(Way("direct", guest_port, guest_pid, ""), options)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each of the two request parts")
    parser.add_argument("--varied", action="store_true", help="no two requests in a row have the same fields")
    parser.add_argument("--mib", type=int, default=512, help="size of the bodies")
    parser.add_argument(
        "--rate-limit", type=float, default=8000, help="the latency part runs at most at half of it"
    )
    parser.add_argument("--role", choices=["guest", "proxy"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        uvloop.run(serve_guest() if options.role == "guest" else serve_proxy())
        return
    result = uvloop.run(run(options))
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
