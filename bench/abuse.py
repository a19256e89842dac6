"""What a well-behaved client pays while others abuse the node: its commands, quiet and under each abuse.

    python bench/abuse.py [--rounds 60] [--json]

A node of its own is started. Clients that abuse it run in a process of their own at the lowest priority,
since elsewhere they would not take this host's processors; a guest that abuses it is a sandbox like the good
one. `ratio` is the p95 under abuse by that of the quiet rounds just before; the goal is at most 3.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from agentenv import config
from measure import show, summary
from stand import BenchNode, Client, node_on, scratch_home

BEGIN_S = 1.5  # that an abuse has before it is measured
HEAD = "POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\n"


def connection(url: str) -> socket.socket:
    """A new one to the node."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), 10)


def slow_heads(url: str, key: str) -> None:
    """A thousand heads, of which each gets another byte every few seconds."""
    clients: list[socket.socket] = []
    while True:
        while len(clients) < 1000:
            clients.append(connection(url))
            clients[-1].sendall(HEAD.encode())
        for client in list(clients):
            try:
                client.sendall(b"X")
            except OSError:
                clients.remove(client)
            time.sleep(0.002)


def head_floods(url: str, key: str) -> None:
    """Heads as long as they may be, one after the other, and some that are longer."""
    fields = "".join(f"X-{number}: {'y' * 50}\r\n" for number in range(900))
    whole = f"GET /v2/sandboxes HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode()
    while True:
        with contextlib.suppress(OSError), connection(url) as client:
            for _ in range(10):
                client.sendall(whole)
                client.recv(65536)
            client.sendall(whole[:-2] * 3)


def uploads(url: str, key: str) -> None:
    """Bodies of gigabytes for the API."""
    head = f"{HEAD}X-API-KEY: {key}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunk = b"%x\r\n%b\r\n" % (65536, b" " * 65536)
    while True:
        with contextlib.suppress(OSError), connection(url) as client:
            client.sendall(head)
            for _ in range(1 << 15):
                client.sendall(chunk)


def idle(url: str, key: str) -> None:
    """Thousands of connections that say nothing."""
    clients = [connection(url) for _ in range(3000)]
    time.sleep(600)
    clients.clear()


OUTSIDE: dict[str, Callable[[str, str], None]] = {
    "slow_heads": slow_heads,
    "head_floods": head_floods,
    "uploads": uploads,
    "idle": idle,
}
INSIDE = {
    "console": "while :; do cat /proc/kallsyms; done >/dev/console 2>/dev/null",
    "disk": "while :; do dd if=/dev/zero of=/tmp/fill bs=1M count=300 conv=fsync; rm /tmp/fill; done",
    "answers": "yes",
}


@contextmanager
def from_outside(name: str, node: BenchNode, key: str) -> Iterator[None]:
    """The abuse of that name by clients."""
    words = [sys.executable, __file__, "--abuse", name, "--url", node.url, "--key", key]
    with subprocess.Popen(["nice", "-n", "19", *words], stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


@contextmanager
def from_inside(name: str, node: BenchNode, sandbox: dict[str, Any]) -> Iterator[None]:
    """The abuse of that name by a guest, whose answers nobody reads."""
    message = {"process": {"cmd": "/bin/bash", "args": ["-c", INSIDE[name]]}, "stdin": False}
    payload = json.dumps(message).encode()
    body = struct.pack(">BI", 0, len(payload)) + payload
    head = (
        "POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\n"
        f"Connect-Protocol-Version: 1\r\nAuthorization: Basic cm9vdDo=\r\nContent-Length: {len(body)}\r\n"
        f"E2b-Sandbox-Id: {sandbox['sandboxID']}\r\nE2b-Sandbox-Port: 49983\r\n"
        f"X-Access-Token: {sandbox.get('envdAccessToken') or ''}\r\n\r\n"
    )
    with connection(node.url) as client:
        client.sendall(head.encode() + body)
        yield


def times(client: Client, sandbox: dict[str, Any], rounds: int) -> list[float]:
    """Seconds of each of so many commands of a well-behaved client."""
    return [client.start_process(sandbox, "true")[0] for _ in range(rounds)]


def measured(node: BenchNode, rounds: int) -> dict[str, Any]:
    """The figures of each abuse."""
    client = node.client()
    key = (node.settings.home / "api-key").read_text().strip()
    good = client.call("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 3600}).body
    times(client, good, 10)
    result: dict[str, Any] = {}
    for name in (*OUTSIDE, *INSIDE):
        quiet = times(client, good, rounds)
        if name in OUTSIDE:
            bad, abuse = None, from_outside(name, node, key)
        else:
            bad = client.call("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 3600}).body
            abuse = from_inside(name, node, bad)
        with abuse:
            time.sleep(BEGIN_S)
            under = times(client, good, rounds)
        if bad is not None:
            client.call("DELETE", f"/sandboxes/{bad['sandboxID']}")
        figures = {f"quiet_{name}": value for name, value in summary(quiet).items()}
        ratio = round(summary(under)["p95_ms"] / summary(quiet)["p95_ms"], 2)
        result[name] = {**summary(under), **figures, "ratio": ratio}
    result["worst_ratio"] = max(each["ratio"] for each in result.values())
    client.call("DELETE", f"/sandboxes/{good['sandboxID']}")
    return result


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--abuse", choices=OUTSIDE, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--key", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.abuse:
        OUTSIDE[options.abuse](options.url, options.key)
        return
    with (
        scratch_home(config.load().home) as settings,
        node_on(settings, pool_most="0", slots_least="0", slots_most="0") as node,
    ):
        result = measured(node, options.rounds)
    show({**result, "rounds": options.rounds}, options.json)


if __name__ == "__main__":
    main()
