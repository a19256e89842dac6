"""A process that outlives its starter: started, recognised again, watched and killed by pidfd.

A pid alone may be another process's by now. The start time and the host's boot id make it certain,
and a pidfd, once opened, never points to another process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.proc import start_time, stat
from agentenv.records.ledger import host_boot_id
from agentenv.vmm import mounts

_EXECUTING_LIMIT_S = 0.5
_YOUNG_S = 60.0
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD of linux/sched.h, in field 9 of /proc/PID/stat


@dataclass(frozen=True)
class Identity:
    """What tells a process from every other one; `start` is in clock ticks since boot (proc(5))."""

    pid: int
    start: int
    boot_id: str


class Process:
    """A running process, a child of this one or not. Made and used on the event loop's thread."""

    def __init__(self, identity: Identity, pidfd: int) -> None:
        self.identity = identity
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[int | None] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._ended)

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def exited(self) -> bool:
        """Whether it is known to be gone."""
        return self._gone.done() and not self._gone.cancelled()

    async def wait(self) -> int | None:
        """Its wait status as `waitstatus_to_exitcode` gives it; None when it was not our child."""
        return await asyncio.shield(self._gone)

    def kill(self) -> None:
        """Send SIGKILL; no effect when it is gone."""
        if self.exited or self._pidfd < 0:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # a zombie, or reaped by another parent: the pidfd is about to say so

    def release(self) -> None:
        """Stop watching; the process goes on. Those who wait are cancelled."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._gone.cancel()

    def _ended(self) -> None:
        status: int | None = None
        try:
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if result is not None:
                status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        except ChildProcessError:
            pass  # adopted: its exit status belongs to its parent
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if not self._gone.done():
            self._gone.set_result(status)


def spawn(
    argv: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Sequence[int],
    *,
    nothing: int,
    output: int,
) -> int:
    """Start a program in a session of its own and return its pid, for `identify`. To be called on a thread
    that does nothing else afterwards, and may have left the host's files.

    Nothing is run between fork and exec, so that the child can be made without copying this
    process's page tables; nor is anything closed there, which without a `/proc` would mean every number.
    Standard input is the descriptor `nothing`, of /dev/null; both outputs go to the descriptor `output`.
    """
    mounts.pass_on(descriptors)
    child = subprocess.Popen(
        argv,
        env=environment,
        close_fds=False,
        stdin=nothing,
        stdout=output,
        stderr=output,
        cwd="/",
        start_new_session=True,
    )
    # It is waited for by its pidfd, or not at all: Popen must neither wait nor complain.
    child.returncode = 0
    return child.pid


def identify(pid: int) -> Identity:
    """Who a child is that has been spawned, and not been waited for."""
    start = start_time(pid)
    assert start is not None  # its entry in /proc exists until somebody waits for it
    return Identity(pid, start, host_boot_id())


def watch(identity: Identity) -> Process | None:
    """That very process if it still runs, else None."""
    if identity.boot_id != host_boot_id():
        return None
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    # Looked at after opening: if the start time is right now, the descriptor is the right process's.
    if start_time(identity.pid) != identity.start:
        os.close(pidfd)
        return None
    return Process(identity, pidfd)


def find(variable: str, value: str) -> Identity | None:
    """The process that has `variable=value` in its environment, if one runs.

    A process that is just executing a program shows an empty environment for a moment; young ones that
    do are looked at again, for up to half a second.
    """
    wanted = os.fsencode(f"{variable}={value}")
    deadline = time.monotonic() + _EXECUTING_LIMIT_S
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    while pids:
        unclear = []
        for pid in pids:
            environment = _environment(pid)
            if wanted in environment.split(b"\0"):
                start = start_time(pid)
                return None if start is None else Identity(pid, start, host_boot_id())
            if not environment and _may_be_executing(pid):
                unclear.append(pid)
        if time.monotonic() > deadline:
            return None
        pids = unclear
        time.sleep(0.002 if unclear else 0)
    return None


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""  # gone meanwhile, or not ours to read


def _may_be_executing(pid: int) -> bool:
    fields = stat(pid)
    if not fields or fields[0] in "ZX" or int(fields[6]) & _KERNEL_THREAD:
        return False
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return age_s < _YOUNG_S
