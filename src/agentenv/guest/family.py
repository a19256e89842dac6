"""The processes that belong to one: its group, its session, and all its descendants.

Read from /proc at the moment of the kill; keeping track all the time would cost every command.
"""

from __future__ import annotations

import os

from agentenv.guest.lean import signal

_ROUNDS = 16


def kill(leader: int) -> None:
    """Kills `leader` and everything that belongs to it.

    They are stopped first, round after round until no new one appears, so that none can fork away
    between the look and the kill; and the tree is known before its upper part dies.
    """
    found: set[int] = set()
    for _ in range(_ROUNDS):
        fresh = members(leader) - found
        if not fresh:
            break
        for pid in fresh:
            _signal(pid, signal.SIGSTOP)
        found |= fresh
    for pid in found | {leader}:
        _signal(pid, signal.SIGKILL)


def members(leader: int) -> set[int]:
    """The pids that belong to `leader`, its own included while it lives; never the agent's."""
    rows = list(_processes())
    found = {pid for pid, _parent, group, session in rows if leader in (pid, group, session)}
    grown = True
    while grown:
        fresh = {pid for pid, parent, _group, _session in rows if parent in found and pid not in found}
        found |= fresh
        grown = bool(fresh)
    found.discard(os.getpid())
    return found


def _processes() -> list[tuple[int, int, int, int]]:
    """(pid, parent, group, session) of every process that is not dead yet."""
    rows = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fd = os.open(f"/proc/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            text = os.read(fd, 512)
        except OSError:
            continue
        finally:
            os.close(fd)
        # The name, in parentheses, may hold anything: what follows the last one is regular.
        state, parent, group, session = text.rpartition(b")")[2].split(None, 4)[:4]
        if state not in (b"Z", b"X"):
            rows.append((int(name), int(parent), int(group), int(session)))
    return rows


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
