"""Processes in a sandbox: started, followed, fed, resized and signalled."""

from __future__ import annotations

import signal
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agentenv.cli.attached.wire import Agent, Line, Message, Stream
from agentenv.errors import NotFound

_OWN_SIGNALS = {signal.SIGTERM: "SIGNAL_SIGTERM", signal.SIGKILL: "SIGNAL_SIGKILL"}

# How a process ended by a signal is told: the words of Go's syscall.Signal, and the signals' numbers.
_WORDS = {
    "hangup": 1,
    "interrupt": 2,
    "quit": 3,
    "illegal instruction": 4,
    "trace/breakpoint trap": 5,
    "aborted": 6,
    "bus error": 7,
    "floating point exception": 8,
    "killed": 9,
    "user defined signal 1": 10,
    "segmentation fault": 11,
    "user defined signal 2": 12,
    "broken pipe": 13,
    "alarm clock": 14,
    "terminated": 15,
}


@dataclass(frozen=True)
class Begun:
    """It runs, or is being followed."""

    pid: int


@dataclass(frozen=True)
class Wrote:
    """It wrote to `stdout`, `stderr` or, in a terminal, to `pty`."""

    stream: str
    data: bytes


@dataclass(frozen=True)
class Ended:
    """It ended; `code` is as a shell tells it: 128 and the number for a signal."""

    code: int
    status: str


Event = Begun | Wrote | Ended


@dataclass(frozen=True)
class Command:
    """What is to be started.

    Args:
        words: the program and its arguments.
        cwd: its directory; the sandbox's default one if None.
        env: variables beside the sandbox's.
        stdin: whether it is fed; else it reads nothing.
        size: columns and rows of the terminal that it gets, or None.
        tag: a name by which it can be found.
    """

    words: Sequence[str]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bool = False
    size: tuple[int, int] | None = None
    tag: str | None = None

    @property
    def message(self) -> Message:
        """What `Start` is sent."""
        process: Message = {"cmd": self.words[0], "args": list(self.words[1:]), "envs": dict(self.env)}
        if self.cwd is not None:
            process["cwd"] = self.cwd
        told: Message = {"process": process, "stdin": self.stdin}
        if self.size is not None:
            told["pty"] = _size(self.size)
        if self.tag is not None:
            told["tag"] = self.tag
        return told


class Following:
    """The events of one process. `close` may be called by another thread."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Event]:
        """Events, the last of them `Ended`.

        Raises:
            LineBroken: the connection ended before the process did.
            DeadlinePassed: it was killed because its time was over.
            AenvError: it cannot be started, or is not there.
        """
        for message in self._stream:
            event = message.get("event", {})
            if "start" in event:
                yield Begun(int(event["start"]["pid"]))
            elif "data" in event:
                for name, text in event["data"].items():
                    yield Wrote(name, b64decode(text))
            elif "end" in event:
                yield _ended(event["end"])

    def close(self) -> None:
        self._stream.close()


def start(agent: Agent, command: Command, *, lifetime_s: float | None = None) -> Following:
    """Start a process, which lives on when it is not followed any longer; killed after `lifetime_s`."""
    return Following(agent.stream("process.Process/Start", command.message, lifetime_s=lifetime_s))


def follow(agent: Agent, process: int | str) -> Following:
    """Follow a process by its pid or tag, from now on."""
    return Following(agent.stream("process.Process/Connect", {"process": _selector(process)}))


def running(line: Line) -> dict[int, Message]:
    """The processes that were started through the agent and run, by pid: `cmd`, `args`, `cwd`, `tag`."""
    rows = line.call("process.Process/List", {}).get("processes", [])
    return {int(row["pid"]): {**row.get("config", {}), "tag": row.get("tag")} for row in rows}


class Hand:
    """What is done to one process, through a connection of its own. Of one thread."""

    def __init__(self, agent: Agent, process: int | str, *, terminal: bool = False) -> None:
        self._agent = agent
        self._line = agent.line()
        self._process = _selector(process)
        self._kind = "pty" if terminal else "stdin"

    def write(self, data: bytes) -> None:
        """Give it input; returns when the process, or the pipe to it, took all.

        Raises:
            GuestFault: it reads no more. NotFound: it has ended. LineBroken: what it got cannot be told.
        """
        given = {"process": self._process, "input": {self._kind: b64encode(data).decode()}}
        self._line.call("process.Process/SendInput", given)

    def end_input(self) -> None:
        """Close its standard input; in a terminal, by the key for it."""
        if self._kind == "pty":
            self.write(b"\x04")
            return
        self._line.call("process.Process/CloseStdin", {"process": self._process})

    def resize(self, size: tuple[int, int]) -> None:
        """Give its terminal columns and rows."""
        self._line.call("process.Process/Update", {"process": self._process, "pty": _size(size)})

    def signal(self, number: int, pid: int) -> None:
        """Send a signal to it and its group; nothing, when it has ended.

        The agent knows two signals, as E2B's does; a shell in the guest sends the others.
        """
        own = _OWN_SIGNALS.get(signal.Signals(number))
        try:
            if own is not None:
                self._line.call("process.Process/SendSignal", {"process": self._process, "signal": own})
            else:
                name = signal.Signals(number).name.removeprefix("SIG")
                script = f"kill -s {name} -- -{pid}"
                for _ in start(self._agent, Command(("/bin/bash", "-c", script), cwd="/")):
                    pass
        except NotFound:
            pass

    def close(self) -> None:
        self._line.close()


def _ended(end: Message) -> Ended:
    status = str(end.get("status", ""))
    code = int(end.get("exitCode", 0))
    word = status.removeprefix("signal: ").removesuffix(" (core dumped)")
    if word != status:
        last = word.rpartition(" ")[2]
        code = 128 + (_WORDS.get(word) or (int(last) if last.isdigit() else 0))
    return Ended(code, status)


def _selector(process: int | str) -> Message:
    return {"pid": process} if isinstance(process, int) else {"tag": process}


def _size(size: tuple[int, int]) -> Message:
    return {"size": {"cols": size[0], "rows": size[1]}}
