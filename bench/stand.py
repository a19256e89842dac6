"""A node of a bench's own, on a scratch data directory that shares the prepared one's files by links."""

from __future__ import annotations

import base64
import http.client
import json
import os
import select
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentenv.config import Settings
from agentenv.records.database import Database

START_LIMIT_S = 120.0
EMPTIED = ("resources", "sandboxes", "idempotency", "snapshots", "snapshot_names")


@contextmanager
def scratch_home(source: Path) -> Iterator[Settings]:
    """A data directory with the guest files and templates of `source` and no past; removed afterwards."""
    home = Path(tempfile.mkdtemp(prefix="aenv-bench-", dir=source.parent))
    settings = Settings(home=home, runtime=Path(f"/run/{home.name}"))
    try:
        for name in ("guest", "images"):
            shutil.copytree(source / name, home / name, copy_function=os.link, symlinks=True)
        for name in ("kvm.json",):
            if (source / name).exists():
                shutil.copy(source / name, home / name)
        _copy_templates(source, home)
        yield settings
    finally:
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(settings.runtime_dir, ignore_errors=True)


def _copy_templates(source: Path, home: Path) -> None:
    original, copy = sqlite3.connect(source / "aenv.db"), sqlite3.connect(home / "aenv.db")
    try:
        original.backup(copy)
        Database(home / "aenv.db").close()  # of this version, whichever the prepared one is
        have = {row[0] for row in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for table in have.intersection(EMPTIED):
            copy.execute(f"DELETE FROM {table}")
        moved = "json_set(document, '$.made.rootfs', replace(document ->> '$.made.rootfs', ?, ?))"
        copy.execute(f"UPDATE builds SET document = {moved}", (str(source), str(home)))
        copy.commit()
    finally:
        original.close()
        copy.close()


@dataclass(frozen=True)
class Call:
    """A call's answer, its seconds from call to answer, and the node's phases in milliseconds."""

    status: int
    body: Any
    seconds: float
    phases: dict[str, float]


class Client:
    """One kept connection to a node."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=180)
        self._key = key

    def call(
        self, method: str, path: str, body: object = None, *, expect: tuple[int, ...] = (200, 201, 204)
    ) -> Call:
        """One request. Ends the bench when the answer is not as expected."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"X-API-KEY": self._key, "Content-Type": "application/json"}
        call = self._send(method, path, data, headers)
        if call.status not in expect:
            raise SystemExit(f"{method} {path}: {call.status} {call.body}")
        return call

    def start_process(self, sandbox: dict[str, Any], command: str) -> tuple[float, bytes]:
        """Run a command in a login shell; seconds until its end, and the raw events."""
        message = {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command]}, "stdin": False}
        payload = json.dumps(message).encode()
        headers = {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Authorization": "Basic " + base64.b64encode(b"root:").decode(),
            "E2b-Sandbox-Id": sandbox["sandboxID"],
            "E2b-Sandbox-Port": "49983",
            "X-Access-Token": sandbox.get("envdAccessToken") or "",
        }
        data = struct.pack(">BI", 0, len(payload)) + payload
        call = self._send("POST", "/process.Process/Start", data, headers, raw=True)
        events: bytes = call.body
        if b'"exited":true' not in events.replace(b" ", b"") or b"exit status 0" not in events:
            raise SystemExit(f"{command!r} in the sandbox did not end well: {call.status} {events[-500:]!r}")
        return call.seconds, events

    def _send(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str], *, raw: bool = False
    ) -> Call:
        begun = time.perf_counter()
        self._connect()
        self._connection.request(method, path, data, headers)
        response = self._connection.getresponse()
        text = response.read()
        seconds = time.perf_counter() - begun
        body = text if raw else json.loads(text) if text else None
        return Call(response.status, body, seconds, timings(response.getheader("Server-Timing") or ""))

    def _connect(self) -> None:
        if getattr(self._connection, "sock", None) is None:
            self._connection.connect()
            self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self._connection.close()


def timings(header: str) -> dict[str, float]:
    """The durations of a Server-Timing header, milliseconds by name; those of one name added up."""
    found: dict[str, float] = {}
    for entry in header.split(","):
        name, _, duration = entry.strip().partition(";dur=")
        if duration:
            found[name] = found.get(name, 0.0) + float(duration)
    return found


class BenchNode:
    """`aenv serve` in a process of its own; `program` is what the interpreter runs in the place of `aenv`."""

    def __init__(
        self, settings: Settings, *, program: Sequence[str] = ("-m", "agentenv"), **given: str
    ) -> None:
        self.settings = settings
        names = {f"AENV_{name.upper()}": value for name, value in given.items()}
        self._environment = {
            **os.environ,
            "AENV_HOME": str(settings.home),
            "AENV_RUNTIME": str(settings.runtime_dir),
            **names,
        }
        ready, theirs = os.pipe()
        self.log = settings.home / "bench.log"
        with self.log.open("ab") as log, os.fdopen(ready, "rb") as pipe:
            self._process = subprocess.Popen(
                [sys.executable, *program, "serve", "--port", "0", "--ready-fd", str(theirs)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs,),
            )
            os.close(theirs)
            answered = select.select([pipe], [], [], START_LIMIT_S)[0]
            self.url = pipe.readline().decode().strip() if answered else ""
        if not self.url:
            self._process.kill()
            raise SystemExit(f"the node did not serve:\n{self.log.read_text()[-3000:]}")

    def client(self) -> Client:
        return Client(self.url, (self.settings.home / "api-key").read_text().strip())

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End all sandboxes and the node."""
        command = [sys.executable, "-m", "agentenv", "node", "stop"]
        subprocess.run(command, env=self._environment, check=False, timeout=180, capture_output=True)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@contextmanager
def node_on(
    settings: Settings, *, program: Sequence[str] = ("-m", "agentenv"), **given: str
) -> Iterator[BenchNode]:
    """A node for the time of the block; settings by their names."""
    node = BenchNode(settings, program=program, **given)
    try:
        yield node
    finally:
        node.close()
