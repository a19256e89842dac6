"""The command line's client of the agent, with the agent as a process on this host."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from agentenv.cli.attached.processes import Begun, Command, Ended, Event, Hand, Wrote, follow, running, start
from agentenv.cli.attached.wire import Agent, DeadlinePassed, LineBroken
from agentenv.errors import GuestFault, InvalidRequest, NotFound, Unauthorized
from support.core_agent import core_agent


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with core_agent() as url:
        yield Agent(url, "here", direct=True)


def outcome(agent: Agent, *words: str) -> tuple[bytes, bytes, Ended]:
    written = {"stdout": b"", "stderr": b""}
    for event in start(agent, Command(words)):
        if isinstance(event, Wrote):
            written[event.stream] += event.data
        elif isinstance(event, Ended):
            return written["stdout"], written["stderr"], event
    raise AssertionError("no end")


def test_output_and_status(agent: Agent) -> None:
    out, err, end = outcome(agent, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (out, err, end) == (b"out\n", b"err\n", Ended(3, "exit status 3"))


@pytest.mark.parametrize(("name", "code"), [("KILL", 137), ("TERM", 143), ("USR1", 138), ("34", 162)])
def test_ends_by_a_signal(agent: Agent, name: str, code: int) -> None:
    assert outcome(agent, "sh", "-c", f"kill -{name} $$")[2].code == code


def test_input_whole_and_its_end(agent: Agent) -> None:
    data = os.urandom(3_000_000)
    following = start(agent, Command(("cat",), stdin=True, tag="cat"))
    events = iter(following)
    assert isinstance(next(events), Begun)
    hand = Hand(agent, "cat")

    def feed() -> None:
        for at in range(0, len(data), 1 << 20):
            hand.write(data[at : at + (1 << 20)])
        hand.end_input()

    feeder = threading.Thread(target=feed)
    feeder.start()
    came = b"".join(event.data for event in events if isinstance(event, Wrote))
    feeder.join()
    assert came == data
    with pytest.raises(NotFound):
        hand.write(b"more")
    hand.close()


def test_a_process_that_reads_no_more(agent: Agent) -> None:
    following = start(agent, Command(("sh", "-c", "exec <&-; echo closed; sleep 60"), stdin=True, tag="deaf"))
    events = iter(following)
    while not isinstance(next(events), Wrote):
        pass
    hand = Hand(agent, "deaf")
    with pytest.raises(GuestFault) as refused:
        hand.write(b"x")
    assert not isinstance(refused.value, LineBroken)
    hand.signal(signal.SIGKILL, 0)
    assert [event.code for event in events if isinstance(event, Ended)] == [137]
    hand.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM])
def test_signals_arrive(agent: Agent, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    # What it says of a child that the signal ended as well is not asked here.
    script = f"exec 2>/dev/null; trap 'echo got; exit 7' {name}; echo ready; while :; do sleep 0.05; done"
    hand, pid, came = Hand(agent, "trap"), 0, b""
    for event in start(agent, Command(("sh", "-c", script), tag="trap")):
        if isinstance(event, Begun):
            pid = event.pid
        elif isinstance(event, Wrote):
            came += event.data
            if event.data == b"ready\n":
                hand.signal(number, pid)
        else:
            assert event.code == 7
    assert came == b"ready\ngot\n"
    hand.signal(number, pid)  # it has ended: nothing
    hand.close()


def test_a_terminal_and_its_size(agent: Agent) -> None:
    script = "stty size; trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.05; done"
    hand, shown = Hand(agent, "tty", terminal=True), b""
    for event in start(agent, Command(("sh", "-c", script), size=(100, 30), tag="tty")):
        if isinstance(event, Wrote):
            shown += event.data
            if b"ready" in event.data:
                hand.resize((120, 50))
    assert b"30 100" in shown and b"50 120" in shown
    hand.close()


def test_following_again_after_leaving(agent: Agent) -> None:
    first = start(agent, Command(("sh", "-c", "read line; echo $line"), stdin=True, tag="again"))
    begun = next(iter(first))
    first.close()
    second = iter(follow(agent, "again"))
    assert next(second) == begun
    assert isinstance(begun, Begun)
    line = agent.line()
    assert running(line)[begun.pid]["tag"] == "again"
    hand = Hand(agent, begun.pid)
    hand.write(b"hello\n")
    rest: list[Event] = list(second)
    assert rest == [Wrote("stdout", b"hello\n"), Ended(0, "exit status 0")]
    hand.close()
    line.close()


def test_closing_by_another_thread_is_a_break(agent: Agent) -> None:
    following = start(agent, Command(("sleep", "60"), tag="sleeper"))
    events = iter(following)
    next(events)
    threading.Timer(0.1, following.close).start()
    with pytest.raises(LineBroken):
        next(events)
    hand = Hand(agent, "sleeper")
    hand.signal(signal.SIGKILL, 0)
    hand.close()


def test_lifetime(agent: Agent) -> None:
    with pytest.raises(DeadlinePassed):
        list(start(agent, Command(("sleep", "60")), lifetime_s=0.2))


def test_refusals_have_their_classes(agent: Agent) -> None:
    with pytest.raises(InvalidRequest, match="no-such-program"):
        list(start(agent, Command(("no-such-program",))))
    with pytest.raises(NotFound):
        list(follow(agent, 999_999))
    with pytest.raises(Unauthorized):
        list(start(Agent(agent.url, "here", user="nobody-known", direct=True), Command(("id",))))


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agent = Agent(f"http://127.0.0.1:{port}", "gone", direct=True)
    with pytest.raises(LineBroken):
        start(agent, Command(("id",)))
    line = agent.line()
    with pytest.raises(LineBroken):
        running(line)
