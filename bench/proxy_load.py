"""The load of `bench/proxy.py`: requests as fast as answers come or at a fixed rate, bodies, WebSockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from dataclasses import dataclass
from itertools import cycle
from typing import cast

from measure import percentile
from proxy_ends import ANSWER_SIZE, BLOCK, SANDBOXES, TOKEN, Running

WARM_S = 0.5
UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: YmVuY2gtYmVuY2gtYmVuYw==\r\n"
)


@dataclass
class Way:
    """A way to the guest: where to connect, and what each head carries.

    A varied way's heads differ from one request of a connection to the next.
    """

    name: str
    process: Running
    fields: str = ""
    varied: bool = False

    def heads(self, start: str, number: int) -> list[bytes]:
        """What a connection sends in turn."""
        head = self.head(start, number)
        return [head, head.replace(b"bench", b"Bench")] if self.varied else [head]

    def head(self, start: str, number: int = 0, more: str = "") -> bytes:
        """A head as an SDK sends it."""
        return (
            f"{start} HTTP/1.1\r\nHost: 127.0.0.1:{self.process.port}\r\nAccept: */*\r\n"
            f"Accept-Encoding: gzip, deflate\r\nUser-Agent: bench\r\n"
            f"X-Access-Token: {TOKEN}\r\n{self.fields.format(n=number % SANDBOXES)}{more}\r\n"
        ).encode()


class Caller(asyncio.Protocol):
    """One keep-alive connection that has one request out at a time."""

    def __init__(self, load: Load, requests: list[bytes]) -> None:
        self.load, self.requests = load, cycle(requests)
        self.transport = cast(asyncio.Transport, None)
        self.due = 0.0
        self.got = self.size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, due: float) -> None:
        self.due, self.got = due, 0
        self.transport.write(next(self.requests))

    def data_received(self, data: bytes) -> None:
        if not self.got:
            if not data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"unexpected answer: {data[:200]!r}")
            self.size = data.index(b"\r\n\r\n") + 4 + ANSWER_SIZE
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

    def due(self, moment: float) -> None:
        """A request is due; if all callers are busy it waits, and that counts."""
        if self.idle:
            self.idle.popleft().send(moment)
        else:
            self.late.append(moment)

    def end(self, callers: list[Caller]) -> None:
        self.running = False
        for caller in callers:
            caller.transport.abort()


async def connect_callers(load: Load, way: Way, connections: int) -> list[Caller]:
    loop = asyncio.get_running_loop()
    callers = []
    for number in range(connections):
        requests = way.heads("GET /", number)
        _, caller = await loop.create_connection(
            lambda r=requests: Caller(load, r),  # type: ignore[misc]
            "127.0.0.1",
            way.process.port,
        )
        callers.append(caller)
    return callers


async def most_requests(way: Way, connections: int, seconds: float) -> dict[str, float]:
    """Requests per second, each connection sending when it got its answer."""
    load = Load()
    callers = await connect_callers(load, way, connections)
    for caller in callers:
        caller.send(0)
    await asyncio.sleep(WARM_S)
    count, cpu, start = load.count, way.process.cpu_s(), time.perf_counter()
    await asyncio.sleep(seconds)
    count, cpu, took = load.count - count, way.process.cpu_s() - cpu, time.perf_counter() - start
    load.end(callers)
    return {
        "requests_per_second": round(count / took),
        "cpu_us_per_request": round(cpu / count * 1e6, 1),
    }


async def latency_at(way: Way, connections: int, rate: float, seconds: float) -> float:
    """The 99th percentile in ms, from when a request was due, at a fixed rate.

    Requests are sent each millisecond, the finest that the loop's timers know: a shorter sleep is none,
    and the load would take the processor from the guest.
    """
    load = Load()
    load.closed_loop = False
    callers = await connect_callers(load, way, connections)
    load.idle.extend(callers)
    due = start = time.perf_counter()
    while (now := time.perf_counter()) < start + WARM_S + seconds:
        if load.latencies and now < start + WARM_S:
            load.latencies.clear()  # the first requests open connections
        while due <= now:
            load.due(due)
            due += 1 / rate
        await asyncio.sleep(0.001)
    load.end(callers)
    return round(percentile(load.latencies, 0.99) * 1e3, 2)


def upload(way: Way, mib: int) -> float:
    """MB/s of one body to the guest."""
    with socket.create_connection(("127.0.0.1", way.process.port)) as sock:
        start = time.perf_counter()
        sock.sendall(way.head("POST /", more=f"Content-Length: {mib << 20}\r\n"))
        for _ in range(mib):
            sock.sendall(BLOCK)
        if not sock.recv(64).startswith(b"HTTP/1.1 200"):
            raise SystemExit("the upload was refused")
        return _mb_s(mib, start)


def download(way: Way, mib: int) -> float:
    """MB/s of one body from the guest."""
    buffer = bytearray(1 << 20)
    with socket.create_connection(("127.0.0.1", way.process.port)) as sock:
        start = time.perf_counter()
        sock.sendall(way.head(f"GET /{mib}"))
        left = mib << 20
        while left > 0:
            size = sock.recv_into(buffer)
            if size == 0:
                raise SystemExit("the download broke off")
            left -= size
        return _mb_s(mib, start)


def _mb_s(mib: int, start: float) -> float:
    return round((mib << 20) / (time.perf_counter() - start) / 1e6, 1)


async def websocket_memory(way: Way, count: int, tls: ssl.SSLContext | None = None) -> float:
    """MiB that so many idle WebSockets cost the process; each has carried a message both ways."""
    message = b"\x81\x84\0\0\0\0idle"
    # What the first connections cost once is not theirs.
    for writer in [await _websocket(way, message, tls) for _ in range(8)]:
        writer.close()
        await writer.wait_closed()
    before = way.process.resident_bytes()
    writers = [await _websocket(way, message, tls) for _ in range(count)]
    cost = way.process.resident_bytes() - before
    for writer in writers:
        writer.transport.abort()
    return round(cost / (1 << 20), 1)


async def _websocket(way: Way, message: bytes, tls: ssl.SSLContext | None) -> asyncio.StreamWriter:
    reader, writer = await asyncio.open_connection("127.0.0.1", way.process.port, ssl=tls)
    writer.write(way.head("GET /echo", more=UPGRADE))
    if b" 101 " not in (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0]:
        raise SystemExit("the WebSocket was refused")
    writer.write(message)
    await reader.readexactly(len(message))
    return writer
