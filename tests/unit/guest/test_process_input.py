"""Standard input and terminals."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.core_agent import Events, Outcome, call, collect, command, core_agent, envelope, stream


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with core_agent() as url:
        yield url


def _input(pid: int, data: bytes, kind: str = "stdin") -> dict[str, Any]:
    return {"process": {"pid": pid}, "input": {kind: base64.b64encode(data).decode()}}


def _until(events: Events, seen: Outcome, text: bytes) -> None:
    """Reads a terminal until it shows `text`."""
    while text not in seen.pty:
        seen.pty += base64.b64decode(events.event()["data"]["pty"])


def test_input_to_its_end(url: str) -> None:
    with stream(
        url, "Start", {"process": {"cmd": "cat"}}
    ) as events:  # stdin is a pipe when not told otherwise
        pid = events.event()["start"]["pid"]
        for data in (b"a\n", b"\x00\xff"):
            assert call(url, "SendInput", _input(pid, data)) == (200, {})
        assert call(url, "CloseStdin", {"process": {"pid": pid}}) == (200, {})
        call(url, "CloseStdin", {"process": {"pid": pid}})
        done = collect(events)
    assert (done.stdout, done.code) == (b"a\n\x00\xff", 0)


def test_input_larger_than_a_pipe(url: str) -> None:
    data = bytes(range(256)) * 20000
    with stream(
        url, "Start", {"process": {"cmd": "sh", "args": ["-c", "sleep 0.2; cat | md5sum"]}}
    ) as events:
        pid = events.event()["start"]["pid"]
        assert call(url, "SendInput", _input(pid, data)) == (200, {})
        call(url, "CloseStdin", {"process": {"pid": pid}})
        import hashlib

        assert collect(events).stdout.split()[0].decode() == hashlib.md5(data).hexdigest()


def test_input_that_nobody_reads(url: str) -> None:
    """The call ends when the process does, with an error."""
    with stream(url, "Start", {"process": {"cmd": "sleep", "args": ["0.5"]}}) as events:
        pid = events.event()["start"]["pid"]
        status, answer = call(url, "SendInput", _input(pid, b"x" * 1_000_000))
        assert (status, answer["code"]) == (500, "internal")
        assert collect(events).code == 0


@pytest.mark.parametrize(
    ("message", "code"),
    [({"pty": "YQ=="}, "internal"), ({"stdin": "YQ=="}, "internal"), ({}, "invalid_argument")],
)
def test_wrong_input(url: str, message: dict[str, str], code: str) -> None:
    with stream(url, "Start", command("sleep", "60")) as events:  # started without input
        pid = events.event()["start"]["pid"]
        _, answer = call(url, "SendInput", {"process": {"pid": pid}, "input": message})
        assert answer["code"] == code
        call(url, "SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})


def test_streamed_input(url: str) -> None:
    """The request stays open while the process answers."""
    with stream(url, "Start", {"process": {"cmd": "cat"}}) as events:
        pid = events.event()["start"]["pid"]
        echoed = b""

        def body() -> Iterator[bytes]:
            nonlocal echoed
            yield envelope({"start": {"process": {"pid": pid}}})
            yield envelope({"keepalive": {}})
            for word in (b"one", b"two"):
                message = envelope({"data": {"input": {"stdin": base64.b64encode(word).decode()}}})
                yield message[:7]
                yield message[7:]
                echoed += base64.b64decode(events.event()["data"]["stdout"])

        answer = httpx.post(
            f"{url}/process.Process/StreamInput",
            content=body(),
            headers={"content-type": "application/connect+json"},
        )
        assert answer.content == envelope({}) + b"\x02\x00\x00\x00\x02{}"
        assert echoed == b"onetwo"
        call(url, "CloseStdin", {"process": {"pid": pid}})
        assert collect(events).code == 0


def test_streamed_input_to_nothing(url: str) -> None:
    answer = httpx.post(
        f"{url}/process.Process/StreamInput",
        content=envelope({"start": {"process": {"pid": 999999}}}),
        headers={"content-type": "application/connect+json"},
    )
    assert b'"not_found"' in answer.content


def test_terminal(url: str) -> None:
    message = {
        "process": {"cmd": "/bin/bash", "args": ["--norc", "-i"], "envs": {"TERM": "xterm", "PS1": "$ "}},
        "pty": {"size": {"cols": 91, "rows": 17}},
    }
    with stream(url, "Start", message, user="nobody") as events:
        pid = events.event()["start"]["pid"]
        seen = Outcome()
        call(url, "SendInput", _input(pid, b"stty size; tty; stat -c %U:%a $(tty)\n", "pty"))
        _until(events, seen, b"17 91")
        _until(events, seen, b"nobody:620")
        assert b"/dev/pts/" in seen.pty
        status, _ = call(url, "Update", {"process": {"pid": pid}, "pty": {"size": {"cols": 20, "rows": 10}}})
        assert status == 200
        call(url, "SendInput", _input(pid, b"stty size\n", "pty"))
        _until(events, seen, b"10 20")
        assert call(url, "SendInput", _input(pid, b"x", "stdin"))[1]["code"] == "internal"
        assert call(url, "CloseStdin", {"process": {"pid": pid}})[1]["code"] == "internal"
        # It is the controlling terminal: job control works, and ^C reaches the foreground.
        call(url, "SendInput", _input(pid, b"sleep 100\n", "pty"))
        _until(events, seen, b"sleep 100")
        call(url, "SendInput", _input(pid, b"\x03", "pty"))
        _until(events, seen, b"^C")
        call(url, "SendInput", _input(pid, b"exit 9\n", "pty"))
        done = collect(events, seen)
    assert done.code == 9


def test_terminal_output_is_complete(url: str) -> None:
    message = {"process": {"cmd": "seq", "args": ["100000"]}, "pty": {"size": {"cols": 80, "rows": 24}}}
    with stream(url, "Start", message) as events:
        done = collect(events)
    assert done.pty == b"".join(b"%d\r\n" % n for n in range(1, 100001))
    assert done.code == 0


def test_killing_a_terminal_takes_its_jobs(url: str) -> None:
    message = {
        "process": {"cmd": "/bin/bash", "args": ["--norc", "-i"]},
        "pty": {"size": {"cols": 80, "rows": 24}},
    }
    with stream(url, "Start", message) as events:
        pid = events.event()["start"]["pid"]
        seen = Outcome()
        call(url, "SendInput", _input(pid, b"nohup sleep 341 & sleep 342 & echo jo''bs\n", "pty"))
        _until(events, seen, b"jobs")
        call(url, "SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
        assert collect(events).end["status"] == "signal: killed"
    with stream(url, "Start", command("pgrep", "-f", "sleep 34[12]")) as events:
        assert collect(events).stdout == b""
