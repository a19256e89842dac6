"""Starting processes: what they get, what they give, and how they end."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.core_agent import command, core_agent, run, shell, stream


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with core_agent() as url:
        yield url


def test_output_and_exit(url: str) -> None:
    done = shell(url, "echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")
    assert done.end == {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}
    assert done.stream_end == {}


def test_success_has_no_error(url: str) -> None:
    assert run(url, "true").end == {"exitCode": 0, "exited": True, "status": "exit status 0"}


@pytest.mark.parametrize(("number", "text"), [(9, "killed"), (15, "terminated"), (1, "hangup")])
def test_death_by_signal(url: str, number: int, text: str) -> None:
    end = shell(url, f"kill -{number} $$").end
    assert end == {"exitCode": -1, "exited": False, "status": f"signal: {text}", "error": f"signal: {text}"}


def test_environment(url: str) -> None:
    lines = (
        run(url, "env", envs={"A": "ü=1", "PATH": "/usr/bin:/bin"}, user="nobody").stdout.decode().split("\n")
    )
    assert {"A=ü=1", "USER=nobody", "LOGNAME=nobody", "PATH=/usr/bin:/bin", "E2B_SANDBOX=true"} <= set(lines)
    assert any(line.startswith("HOME=/") for line in lines)


def test_user_with_groups_and_nothing_of_root_left(url: str) -> None:
    lines = run(url, "cat", "/proc/self/status", user="nobody").stdout.decode().split("\n")
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert status["Uid"].split() == ["65534"] * 4
    assert status["Gid"].split() == ["65534"] * 4
    assert status["Groups"].split() == ["65534"]
    for name in ("CapPrm", "CapEff", "CapInh", "CapAmb"):
        assert int(status[name], 16) == 0
    assert int(status["CapBnd"], 16) != 0  # sudo works


def test_clean_start(url: str) -> None:
    """Default signals, no descriptors of the agent, a session of its own, the usual umask."""
    lines = run(url, "cat", "/proc/self/status").stdout.decode().split("\n")
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    standard = 0x7FFFFFFF  # signals 32 and 33 are the C library's own: its posix_spawn ignores them
    assert (int(status["SigIgn"], 16) & standard, int(status["SigBlk"], 16)) == (0, 0)
    assert status["Umask"].strip() == "0022"
    done = shell(url, "ls /proc/$$/fd; cut -d' ' -f1,5,6 /proc/$$/stat")
    *descriptors, ids = done.stdout.decode().split("\n")[:-1]
    assert set(descriptors) <= {"0", "1", "2"}
    assert ids.split() == [str(done.pid)] * 3
    assert shell(url, "cat").code == 0  # stdin is /dev/null


def test_a_user_can_reopen_its_output(url: str) -> None:
    done = shell(url, "echo a > /dev/stdout; echo b > /dev/stderr", user="nobody")
    assert (done.stdout, done.stderr, done.code) == (b"a\n", b"b\n", 0)


def test_directories(url: str, tmp_path: Path) -> None:
    home = run(url, "pwd").stdout.decode().strip()
    assert home == os.path.expanduser("~root")
    assert run(url, "pwd", cwd=str(tmp_path)).stdout.decode().strip() == str(tmp_path)
    assert run(url, "pwd", cwd="~").stdout.decode().strip() == home
    assert run(url, "pwd", cwd="../tmp").stdout == b"/tmp\n"
    assert run(url, "pwd", user="nobody").stdout == b"/\n"  # its home does not exist


@pytest.mark.parametrize(
    ("process", "code", "text"),
    [
        ({"cwd": "/no/such"}, "invalid_argument", "cwd '/no/such' does not exist"),
        ({"cwd": "/etc/passwd"}, "invalid_argument", "cwd '/etc/passwd' is not a directory"),
        ({"cmd": "/no/such"}, "invalid_argument", "/no/such"),
        ({"cmd": "no-such-program"}, "invalid_argument", "no-such-program"),
        ({"cmd": "/etc/passwd"}, "invalid_argument", "Permission denied"),
        ({"cmd": ""}, "invalid_argument", "process.cmd is empty"),
        ({"args": "x"}, "invalid_argument", "process.args"),
        ({"args": ["a\0b"]}, "invalid_argument", "null"),
        ({"envs": {"A": 1}}, "invalid_argument", "process.envs"),
    ],
)
def test_what_cannot_be_started(url: str, process: dict[str, object], code: str, text: str) -> None:
    with stream(url, "Start", {"process": {"cmd": "true", **process}}) as events:
        assert events.next() is None
    assert events.end is not None
    assert events.end["error"]["code"] == code
    assert text in events.end["error"]["message"]


def test_unknown_user(url: str) -> None:
    with stream(url, "Start", command("true"), user="nosuch") as events:
        assert events.next() is None
    assert events.end == {"error": {"code": "unauthenticated", "message": "invalid username: 'nosuch'"}}


def test_a_directory_that_the_user_may_not_enter(url: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with stream(url, "Start", command("pwd", cwd=str(tmp_path)), user="nobody") as events:
        assert events.next() is None
    assert events.end is not None and "Permission denied" in events.end["error"]["message"]


def test_twenty_megabytes_on_each_stream(url: str) -> None:
    """Complete and in order; the two are written at once."""
    script = "import sys, threading, random\n" + (
        "def write(file, seed):\n"
        "    data = random.Random(seed).randbytes(1000003)\n"
        "    for _ in range(20): file.buffer.write(data)\n"
        "    file.flush()\n"
        "other = threading.Thread(target=write, args=(sys.stderr, 2)); other.start()\n"
        "write(sys.stdout, 1); other.join()\n"
    )
    import random
    import sys

    done = run(url, sys.executable, "-c", script)
    for seed, data in ((1, done.stdout), (2, done.stderr)):
        expected = random.Random(seed).randbytes(1000003) * 20
        assert hashlib.sha256(data).digest() == hashlib.sha256(expected).digest()


def test_output_is_bytes(url: str) -> None:
    assert shell(url, r"printf '\377\000\303'").stdout == b"\xff\x00\xc3"


def test_many_at_once(url: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda n: shell(url, f"echo {n}; exit {n}"), range(64)))
    assert [(done.stdout, done.code) for done in results] == [(b"%d\n" % n, n) for n in range(64)]


def test_default_signals_include_sigpipe(url: str) -> None:
    done = shell(url, "yes | head -1")
    assert (done.stdout, done.stderr) == (b"y\n", b"")
