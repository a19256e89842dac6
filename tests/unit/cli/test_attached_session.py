"""A terminal attached to a process, with the agent as a process on this host."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentenv.cli.attached.processes import Hand
from agentenv.cli.attached.wire import Agent
from support import attached_shell
from support.core_agent import core_agent
from support.screen import Screen

PROGRAM = [sys.executable, "-W", "error", str(attached_shell.__file__)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with core_agent() as address:
        yield address


@pytest.fixture
def attached(url: str, request: pytest.FixtureRequest) -> Callable[..., Screen]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(how: str = "start", *words: str, size: tuple[int, int] = (80, 24)) -> Screen:
        return Screen([*PROGRAM, url, request.node.name, how, *words], environment, size)

    return run


def test_a_shell_to_its_end(attached: Callable[..., Screen]) -> None:
    with attached(size=(100, 30)) as screen:
        screen.wait_for(b"ready> ")
        screen.type(b"stty size\r")
        screen.wait_for(b"30 100\r\n")
        screen.resize(120, 40)
        screen.type(b"until stty size | grep '^40 120'; do sleep 0.05; done\r")
        screen.wait_for(b"40 120\r\n")
        screen.type(b"sh -c 'echo be\\gun; exec sleep 600'\r")
        screen.wait_for(b"begun\r\n")
        screen.type(b"\x03")
        screen.wait_for(b"ready> ")
        screen.type(b"exit 5\r")
        screen.wait_for(b"outcome: Ended(code=5")
        assert screen.end() == 0


def test_leaving_and_going_back(attached: Callable[..., Screen]) -> None:
    with attached() as screen:
        screen.wait_for(b"ready> ")
        screen.type(b"kept=yes\r")
        screen.wait_for(b"ready> ")
        screen.type(b"\x10\x11")
        screen.wait_for(b"outcome: Left(by=0)")
        assert screen.end() == 0
    with attached("follow") as screen:
        screen.type(b"\recho kept: $kept\r")
        screen.wait_for(b"kept: yes\r\n")
        screen.type(b"exit\r")
        screen.wait_for(b"outcome: Ended(code=0")
        assert screen.end() == 0


def test_a_key_that_only_begins_the_sequence_arrives(attached: Callable[..., Screen]) -> None:
    with attached(
        "start", "sh", "-c", "stty raw; echo ready; dd bs=1 count=2 2>/dev/null | od -An -tx1"
    ) as screen:
        screen.wait_for(b"ready")
        screen.type(b"\x10")  # held back, and let go of a little later
        screen.type(b"x")
        screen.wait_for(b"10 78")
        screen.wait_for(b"outcome: Ended(code=0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_shell(attached: Callable[..., Screen], number: int, url: str) -> None:
    with attached("start", "sh", "-c", "printf '\\033[?1049hfull'; exec sleep 600") as screen:
        screen.wait_for(b"full")
        screen.process.send_signal(number)
        screen.wait_for(b"\x1b[?1049l")
        screen.wait_for(b"outcome: Left(by=%d)" % number)
        assert screen.end() == 0


def test_a_paste_arrives_whole(attached: Callable[..., Screen], tmp_path: Path) -> None:
    lines = b"".join(b"%05d %s\n" % (number, b"x" * 60) for number in range(1500))
    with attached() as screen:
        screen.wait_for(b"ready> ")
        screen.type(b"stty -echo; cat > %s; stty echo; echo do''ne\r" % bytes(tmp_path / "pasted"))
        screen.wait_for(b"do''ne\r\n")
        screen.type(lines.replace(b"\n", b"\r"))
        screen.type(b"\x04")
        screen.wait_for(b"done\r\n")
        screen.type(b"exit\r")
        screen.wait_for(b"outcome: Ended")
        assert screen.end() == 0
    assert (tmp_path / "pasted").read_bytes() == lines
    assert len(lines) > 100_000


def test_keys_are_looked_at_while_the_process_reads_nothing(
    attached: Callable[..., Screen], url: str, request: pytest.FixtureRequest
) -> None:
    with attached("start", "sh", "-c", "stty raw -echo; echo ready; exec sleep 600") as screen:
        screen.wait_for(b"ready")
        screen.type(b"y" * 300_000)
        screen.type(b"\x10\x11")
        screen.wait_for(b"outcome: Left(by=0)")
        assert screen.end() == 0
    hand = Hand(Agent(url, "here", direct=True), request.node.name)
    hand.signal(signal.SIGKILL, 0)
    hand.close()
