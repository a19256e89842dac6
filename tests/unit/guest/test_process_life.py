"""Time limits, signals, background children, and followers who come and go."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.core_agent import call, collect, command, core_agent, run, shell, stream


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with core_agent() as url:
        yield url


def _commands(marker: str) -> list[str]:
    """The command lines of the living processes in which `marker` occurs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marker in line and state != "Z":
            found.append(line)
    return found


def _wait_until_gone(marker: str) -> None:
    deadline = time.monotonic() + 20
    while _commands(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _commands(marker) == []


@pytest.mark.parametrize(
    "script",
    [
        "echo before; sleep 30{n} & wait",
        "echo before; sleep 30{n}",
        "echo before; setsid sleep 30{n} & sh -c 'setsid sleep 30{n} & wait' & wait",
        "trap '' TERM HUP; echo before; (trap '' TERM; sleep 30{n}) & wait",
    ],
)
def test_timeout_kills_the_whole_family(url: str, script: str, request: pytest.FixtureRequest) -> None:
    """What was written before arrives; nothing is left."""
    number = f"{os.getpid()}{request.node.callspec.indices['script']}"
    with stream(
        url, "Start", command("sh", "-c", script.format(n=number)), connect_timeout_ms="400"
    ) as events:
        done = collect(events)
    assert done.stdout == b"before\n"
    assert done.end == {}
    assert done.stream_end["error"]["code"] == "deadline_exceeded"
    _wait_until_gone(f"sleep 30{number}")


def test_timeout_of_fifty_milliseconds(url: str) -> None:
    marker = f"31{os.getpid()}"
    message = command("sh", "-c", f"sleep {marker} & wait")
    with stream(url, "Start", message, connect_timeout_ms="50") as events:
        assert collect(events).stream_end["error"]["code"] == "deadline_exceeded"
    _wait_until_gone(f"sleep {marker}")


def test_a_background_child_does_not_keep_the_command(url: str) -> None:
    marker = f"32{os.getpid()}"
    done = shell(url, f"echo a; sleep {marker} & echo b")
    assert (done.stdout, done.code, done.stream_end) == (b"a\nb\n", 0, {})
    assert _commands(f"sleep {marker}")
    os.kill(int(shell(url, f"pgrep -f 'sleep {marker}' | head -1").stdout), signal.SIGKILL)


def test_a_background_child_can_go_on_writing(url: str, tmp_path: Path) -> None:
    """Its output goes nowhere, more than a pipe holds of it; it gets no SIGPIPE."""
    script = f"(sleep 0.3; head -c 300000 /dev/zero && echo fine > {tmp_path}/said) & echo a"
    assert shell(url, script).stdout == b"a\n"
    deadline = time.monotonic() + 20
    while not (tmp_path / "said").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / "said").read_text() == "fine\n"


def test_what_ends_with_the_command_is_waited_for(url: str) -> None:
    assert run(url, "bash", "-c", "echo a > >(cat)").stdout == b"a\n"


def test_a_client_that_leaves_kills_nothing(url: str, tmp_path: Path) -> None:
    """And the process does not block on the output that nobody takes."""
    script = f"echo first; sleep 0.2; head -c 3000000 /dev/zero; echo done > {tmp_path}/done"
    with stream(url, "Start", command("sh", "-c", script)) as events:
        pid = events.event()["start"]["pid"]
        assert "data" in events.event()
    with stream(url, "Connect", {"process": {"pid": pid}}) as events:
        done = collect(events)
    assert done.code == 0
    assert (tmp_path / "done").exists()


def test_a_slow_client_slows_the_process(url: str, tmp_path: Path) -> None:
    """The agent holds little of what a client does not take; nothing is lost."""
    script = f"head -c 30000000 /dev/zero; echo x > {tmp_path}/written"
    with stream(url, "Start", command("sh", "-c", script)) as events:
        assert "start" in events.event()
        time.sleep(0.5)  # that long it could have written everything
        assert not (tmp_path / "written").exists()
        assert len(collect(events).stdout) == 30_000_000
    assert (tmp_path / "written").exists()


def test_a_follower_that_leaves_makes_room(url: str) -> None:
    with stream(
        url, "Start", command("sh", "-c", "read x; head -c 20000000 /dev/zero") | {"stdin": True}
    ) as main:
        pid = main.event()["start"]["pid"]
        with stream(url, "Connect", {"process": {"pid": pid}}) as other:
            assert other.event() == {"start": {"pid": pid}}
            assert call(url, "SendInput", {"process": {"pid": pid}, "input": {"stdin": "Cg=="}})[0] == 200
            assert "data" in other.event()
        assert len(collect(main).stdout) == 20_000_000


def test_two_followers_get_the_same(url: str) -> None:
    message = command("sh", "-c", "read x; seq 20000; exit 4") | {"stdin": True, "tag": "seq"}
    with stream(url, "Start", message) as first:
        pid = first.event()["start"]["pid"]
        with stream(url, "Connect", {"process": {"tag": "seq"}}) as second:
            assert second.event() == {"start": {"pid": pid}}
            call(url, "SendInput", {"process": {"pid": str(pid)}, "input": {"stdin": "Cg=="}})
            outcomes = [collect(first), collect(second)]
    assert outcomes[0].stdout == outcomes[1].stdout == b"".join(b"%d\n" % n for n in range(1, 20001))
    assert [outcome.code for outcome in outcomes] == [4, 4]


def test_the_end_can_be_asked_for_later(url: str) -> None:
    pid = shell(url, "echo x; exit 5").pid
    with stream(url, "Connect", {"process": {"pid": pid}}) as events:
        late = collect(events)
    assert (late.pid, late.stdout, late.code) == (pid, b"", 5)
    assert call(url, "SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}) == (
        404,
        {"code": "not_found", "message": f"process with pid {pid} not found"},
    )


def test_list(url: str) -> None:
    started = {"cmd": "sleep", "args": ["60"], "envs": {"A": "b"}, "cwd": "/tmp"}
    with stream(url, "Start", {"process": started, "tag": "napping", "stdin": False}) as events:
        pid = events.event()["start"]["pid"]
        rows = call(url, "List", {})[1]["processes"]
        assert {"config": started, "pid": pid, "tag": "napping"} in rows
        assert call(url, "SendSignal", {"process": {"tag": "napping"}, "signal": "SIGNAL_SIGTERM"}) == (
            200,
            {},
        )
        assert collect(events).end["status"] == "signal: terminated"
    assert pid not in [row["pid"] for row in call(url, "List", {})[1]["processes"]]


def test_kill_takes_the_children(url: str) -> None:
    marker = f"33{os.getpid()}"
    with stream(url, "Start", command("sh", "-c", f"sleep {marker} & sleep {marker}")) as events:
        pid = events.event()["start"]["pid"]
        assert call(url, "SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})[0] == 200
        assert collect(events).end["status"] == "signal: killed"
    _wait_until_gone(f"sleep {marker}")


@pytest.mark.parametrize(
    ("method", "message", "status", "code"),
    [
        ("SendSignal", {"process": {"pid": 999999}, "signal": "SIGNAL_SIGTERM"}, 404, "not_found"),
        ("SendSignal", {"process": {"pid": 1}, "signal": "SIGNAL_SIGTERM"}, 404, "not_found"),
        ("SendSignal", {"process": {"pid": 1}, "signal": "SIGNAL_X"}, 400, "invalid_argument"),
        ("SendSignal", {"process": {"pid": "x"}, "signal": "SIGNAL_SIGKILL"}, 400, "invalid_argument"),
        ("SendSignal", {"process": 3, "signal": "SIGNAL_SIGKILL"}, 400, "invalid_argument"),
        ("SendInput", {"process": {"tag": "none"}, "input": {"stdin": ""}}, 404, "not_found"),
        ("CloseStdin", {}, 404, "not_found"),
        ("Update", {"process": {"pid": 4}, "pty": {"size": {"cols": 1, "rows": 1}}}, 404, "not_found"),
    ],
)
def test_faults(url: str, method: str, message: dict[str, object], status: int, code: str) -> None:
    answer = call(url, method, message)
    assert (answer[0], answer[1]["code"]) == (status, code)


def test_connect_to_nothing(url: str) -> None:
    with stream(url, "Connect", {"process": {"pid": 999999}}) as events:
        assert events.next() is None
    assert events.end == {"error": {"code": "not_found", "message": "process with pid 999999 not found"}}


def test_following_has_a_time_limit_of_its_own(url: str) -> None:
    with stream(url, "Start", command("sleep", "60")) as main:
        pid = main.event()["start"]["pid"]
        with stream(url, "Connect", {"process": {"pid": pid}}, connect_timeout_ms="60") as events:
            assert collect(events).stream_end["error"]["code"] == "deadline_exceeded"
        assert call(url, "SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})[0] == 200


def test_keepalive(url: str) -> None:
    with stream(url, "Start", command("sleep", "60"), keepalive_ping_interval="1") as events:
        pid = events.event()["start"]["pid"]
        assert events.event() == {"keepalive": {}}
        call(url, "SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
