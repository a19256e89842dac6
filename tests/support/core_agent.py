"""The whole guest agent in a process of its own on the host, and a bare client of its protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx

# Namespaces of its own: there the agent is process 1, and may change the host name and mounts.
OWN_MACHINE = ("unshare", "--pid", "--fork", "--mount-proc", "--uts", "--mount")


@contextlib.contextmanager
def core_agent(*options: str, prefix: tuple[str, ...] = (), gateway: str = "127.0.0.1") -> Iterator[str]:
    """A served agent's base URL, for the time of the block.

    Its standard error is checked at the end: it has nothing to say when all is well.
    """
    command = [*prefix, sys.executable, "-W", "error", "-m", "agentenv.guest"]
    command += ["--listen", "127.0.0.1", "--port", "0", "--gateway", gateway, *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            yield f"http://{process.stdout.readline().split()[-1]}"
        finally:
            running = process.poll() is None
            os.killpg(process.pid, signal.SIGKILL)  # with what stands between: unshare, sh
            said = process.stderr.read()
        assert running, f"the agent died: {said}"
        assert said == ""


class Events:
    """The messages of a server stream, read one by one from an open response."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._chunks = response.iter_raw()
        self._buffer = b""
        self.end: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (message := self.next()) is not None:
            yield message

    def next(self) -> dict[str, Any] | None:
        """The next message; None at the end of the stream, whose payload is then in `end`."""
        if self.end is not None:
            return None
        flags, size = self._take(1)[0], int.from_bytes(self._take(4), "big")
        payload: dict[str, Any] = json.loads(self._take(size))
        if flags == 2:
            self.end = payload
            return None
        return payload

    def event(self) -> dict[str, Any]:
        """The next message's event."""
        message = self.next()
        assert message is not None, self.end
        event: dict[str, Any] = message["event"]
        return event

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._buffer += next(self._chunks)
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data


class Outcome:
    """What a process wrote and how it ended."""

    def __init__(self) -> None:
        self.pid = 0
        self.stdout = b""
        self.stderr = b""
        self.pty = b""
        self.end: dict[str, Any] = {}
        self.stream_end: dict[str, Any] = {}

    @property
    def code(self) -> Any:
        return self.end.get("exitCode", 0)


def envelope(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return b"\0" + len(data).to_bytes(4, "big") + data


@contextlib.contextmanager
def stream(
    url: str, method: str, message: dict[str, Any], user: str | None = None, **headers: str
) -> Iterator[Events]:
    """An open server stream of `process.Process`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named["content-type"] = "application/connect+json"
    auth = httpx.BasicAuth(user, "") if user is not None else None
    request = httpx.stream(
        "POST",
        f"{url}/process.Process/{method}",
        content=envelope(message),
        headers=named,
        auth=auth,
        timeout=60,
    )
    with request as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "application/connect+json")
        yield Events(response)


def call(url: str, method: str, message: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """A unary call of `process.Process`: status and answer."""
    answer = httpx.post(f"{url}/process.Process/{method}", json=message, timeout=60)
    return answer.status_code, answer.json()


def collect(events: Events, outcome: Outcome | None = None) -> Outcome:
    """Reads a process's stream to its end."""
    outcome = outcome or Outcome()
    for message in events:
        event = message["event"]
        if "start" in event:
            outcome.pid = event["start"]["pid"]
        elif "data" in event:
            for name, text in event["data"].items():
                setattr(outcome, name, getattr(outcome, name) + base64.b64decode(text))
        elif "end" in event:
            outcome.end = event["end"]
    assert events.end is not None
    outcome.stream_end = events.end
    return outcome


def command(*argv: str, **process: Any) -> dict[str, Any]:
    """A Start message for `argv`; keywords go into its `process`."""
    return {"process": {"cmd": argv[0], "args": list(argv[1:]), **process}, "stdin": False}


def run(url: str, *argv: str, user: str | None = None, **process: Any) -> Outcome:
    """Runs a command to its end."""
    with stream(url, "Start", command(*argv, **process), user) as events:
        return collect(events)


def shell(url: str, script: str, user: str | None = None, **process: Any) -> Outcome:
    """Runs a script with sh to its end."""
    return run(url, "sh", "-c", script, user=user, **process)
