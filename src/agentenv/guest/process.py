"""A process that a client started, from its start to the end of its output."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from agentenv.guest import family, launch, loop, reaper, terminal
from agentenv.guest.lean import signal
from agentenv.guest.process_input import Input
from agentenv.guest.process_output import Output, Subscription

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from agentenv.guest.users import User

# How long, after the process has ended, a stream that something in the background still holds open is
# waited for: what is about to end with it (`>(tee log)`) gets its output in.
GRACE_SECONDS = 0.05

# The words are those of Go's syscall.Signal, which clients know from E2B's envd.
_SIGNAL_NAMES = {
    1: "hangup",
    2: "interrupt",
    3: "quit",
    4: "illegal instruction",
    5: "trace/breakpoint trap",
    6: "aborted",
    7: "bus error",
    8: "floating point exception",
    9: "killed",
    10: "user defined signal 1",
    11: "segmentation fault",
    12: "user defined signal 2",
    13: "broken pipe",
    14: "alarm clock",
    15: "terminated",
}


class Process:
    """A started process.

    Attributes:
        terminal: the output of the terminal that it runs in, if it does.
        end: the fields of its end event, once it has ended and its output has been read.
        expired: whether it was killed because its time was over.
    """

    def __init__(self, pid: int, config: dict[str, Any], tag: str | None) -> None:
        self.pid = pid
        self.config = config
        self.tag = tag
        self.terminal: Output | None = None
        self.input: Input | None = None
        self.end: dict[str, Any] | None = None
        self.expired = False
        self.on_end: Callable[[], object] = lambda: None
        self._status: int | None = None
        self._over = False  # waiting for streams that others hold open
        self._outputs: list[Output] = []
        self._subscriptions: list[Subscription] = []
        self._timers: list[loop.Timer] = []
        reaper.expect(pid, self._on_exit)

    @property
    def alive(self) -> bool:
        """Whether its pid is still its own."""
        return self._status is None

    def attach(self, name: str, fd: int) -> Output:
        """Begins to read one of its streams."""
        output = Output(name, fd, self._congested, self._publish, self._look)
        self._outputs.append(output)
        return output

    def subscribe(self) -> Subscription:
        """A subscription to what it writes from now on."""
        subscription = Subscription(self._resume)
        if self.end is not None:
            subscription.close()
        else:
            self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """The subscriber is gone; the process does not wait for it any longer."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._resume()

    def expire_after(self, seconds: float) -> None:
        """Kills it, with all that belongs to it, when it still runs after `seconds`."""
        self._timers.append(loop.call_later(seconds, self._expire))

    def signal(self, number: int) -> None:
        """Sends a signal to its process group; SIGKILL takes its whole family.

        Raises:
            ProcessLookupError: it has ended.
        """
        if not self.alive:
            raise ProcessLookupError
        if number == signal.SIGKILL:
            family.kill(self.pid)
        else:
            os.killpg(self.pid, number)

    def _expire(self) -> None:
        if self.alive:
            self.expired = True
            family.kill(self.pid)

    def _on_exit(self, status: int) -> None:
        self._status = status
        for timer in self._timers:
            timer.cancel()
        if self.input is not None:
            self.input.close()
        for output in list(self._outputs):
            if output.open:
                output.mark(_unread(output.fd))
                output.pump()
        self._look()

    def _look(self) -> None:
        """Ends it, when it has exited and everything it wrote has been read."""
        if self.terminal is not None and not self.terminal.open and self.input is not None:
            self.input.close()  # the terminal's descriptor is gone
        if self._status is None or self.end is not None:
            return
        if all(not output.open for output in self._outputs):
            self._finish()
        elif not self._over and all(output.drained for output in self._outputs):
            self._over = True
            self._timers.append(loop.call_later(GRACE_SECONDS, self._finish))

    def _finish(self) -> None:
        if self.end is not None or self._status is None:
            return
        self.end = end_of(self._status)
        for timer in self._timers:
            timer.cancel()
        for subscription in self._subscriptions:
            subscription.close()
        self._subscriptions.clear()
        for output in self._outputs:
            output.forget()
        self.on_end()

    def _congested(self) -> bool:
        return any(subscription.full for subscription in self._subscriptions)

    def _publish(self, name: str, data: bytes) -> None:
        for subscription in self._subscriptions:
            subscription.put(name, data)

    def _resume(self) -> None:
        for output in self._outputs:
            output.resume()


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    user: User,
    *,
    stdin: bool,
    size: tuple[int, int] | None,
    config: dict[str, Any],
    tag: str | None,
) -> Process:
    """Starts a process as `user`, with pipes or, when a terminal's `size` (columns, rows) is given, in one.

    Raises:
        OSError, ValueError: as `launch.spawn`.
    """
    if size is not None:
        return _start_in_terminal(argv, env, cwd, user, size, config, tag)
    ours: list[int] = []
    theirs: list[int] = []
    try:
        with launch.Identity(user):
            if stdin:
                _pipe(theirs, ours, write=True)
            else:
                theirs.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            _pipe(theirs, ours, write=False)
            _pipe(theirs, ours, write=False)
            pid = launch.spawn(argv, env, cwd, theirs)
    except BaseException:
        for fd in ours:
            os.close(fd)
        raise
    finally:
        for fd in theirs:
            os.close(fd)
    process = Process(pid, config, tag)
    if stdin:
        process.input = Input(ours[0], owned=True)
    process.attach("stdout", ours[-2])
    process.attach("stderr", ours[-1])
    return process


def _start_in_terminal(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    user: User,
    size: tuple[int, int],
    config: dict[str, Any],
    tag: str | None,
) -> Process:
    master, slave, path = terminal.open_pair(user, *size)
    try:
        with launch.Identity(user):
            pid = launch.spawn(argv, env, cwd, path)
    except BaseException:
        os.close(master)
        raise
    finally:
        os.close(slave)
    process = Process(pid, config, tag)
    process.input = Input(master, owned=False)
    process.terminal = process.attach("pty", master)
    process.terminal.on_writable(process.input.on_room)
    return process


def end_of(status: int) -> dict[str, Any]:
    """The end event's fields for a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        text = f"signal: {_SIGNAL_NAMES.get(number, f'signal {number}')}"
        if os.WCOREDUMP(status):
            text += " (core dumped)"
        return {"exitCode": -1, "exited": False, "status": text, "error": text}
    code = os.WEXITSTATUS(status)
    end: dict[str, Any] = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
    if code:
        end["error"] = end["status"]
    return end


def _pipe(theirs: list[int], ours: list[int], *, write: bool) -> None:
    """A pipe of which the agent has the writing end or the reading one, non-blocking."""
    reading, writing = os.pipe()  # close-on-exec, both
    mine, other = (writing, reading) if write else (reading, writing)
    ours.append(mine)
    theirs.append(other)
    os.set_blocking(mine, False)


def _unread(fd: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])
