"""Memory for a host that runs out of it: looks from time to time, and does what `pressure` decides."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import AenvError
from agentenv.sandbox.admission import meminfo_mib
from agentenv.sandbox.core import Core
from agentenv.sandbox.live import Live
from agentenv.sandbox.pausing import Pausing
from agentenv.sandbox.pressure import Host, Kind, Policy, Resident, decide
from agentenv.sandbox.refreshing import Refreshing
from agentenv.sandbox.transitions import State
from agentenv.vmm.pageout import page_out
from agentenv.vmm.usage import Usage, usages

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
# A guest that computes is not idle, though nobody asks it for anything.
BUSY = 0.1  # processors

_PRESSURE = Path("/proc/pressure/memory")


@dataclass
class _Known:
    """What was seen of a sandbox. Times are seconds of the monotonic clock."""

    pid: int
    at: float
    cpu_s: float
    active_at: float
    done: set[Kind]


class Relief:
    """Looks after a node's memory.

    Args:
        host: reads the host's memory.
    """

    def __init__(
        self,
        core: Core,
        refreshing: Refreshing,
        pausing: Pausing,
        policy: Policy,
        *,
        host: Callable[[], Host] | None = None,
    ) -> None:
        self._core = core
        self._refreshing = refreshing
        self._pausing = pausing
        self._policy = policy
        self._host = host or host_memory
        self._known: dict[str, _Known] = {}
        self._pressed = False
        self._every_s = min(LOOK_EVERY_S, max(1.0, policy.idle_s))
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look, unless nothing may be done anyway."""
        if self._policy.kinds:
            self._task = asyncio.create_task(self._look_on(), name="memory pressure")

    async def stop(self) -> None:
        """Look no more; what was begun ends by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look_on(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._every_s)

    async def look(self) -> None:
        """Look once, and do what follows."""
        running = {
            live.record.id: live
            for live in self._core.all
            if live.record.state is State.RUNNING and not live.busy and live.machine is not None
        }
        pids = {name: live.machine.pid for name, live in running.items() if live.machine is not None}
        host, samples = await asyncio.to_thread(self._read, pids.values())
        now = time.monotonic()
        residents = []
        for name, live in running.items():
            if (sample := samples.get(pids[name])) is not None:
                known = self._note(live, pids[name], sample, now)
                residents.append(Resident(name, now - known.active_at, sample.own_mib, frozenset(known.done)))
        for name in self._known.keys() - running.keys():
            del self._known[name]
        found = decide(host, residents, self._policy, pressed=self._pressed)
        if found.pressed != self._pressed:
            log.warning("memory of the host: %s, %s", "scarce" if found.pressed else "enough", host)
        self._pressed = found.pressed
        self._core.admission.set_scarce(found.pressed)
        for kind, name in found.actions:
            self._known[name].done.add(kind)
            await self._do(kind, running[name])

    def _read(self, pids: Collection[int]) -> tuple[Host, dict[int, Usage]]:
        return self._host(), usages(pids)

    def _note(self, live: Live, pid: int, sample: Usage, now: float) -> _Known:
        """What is known of a sandbox by now. One that is seen for the first time counts as active."""
        known = self._known.get(live.record.id)
        if known is None:
            known = _Known(pid, now, sample.cpu_s, now, set())
            self._known[live.record.id] = known
            return known
        active_at = live.active_at
        if known.pid == pid and sample.cpu_s - known.cpu_s > BUSY * (now - known.at):
            active_at = now
        if active_at > known.active_at:
            known.active_at = active_at
            known.done.clear()
        known.pid, known.at, known.cpu_s = pid, now, sample.cpu_s
        return known

    async def _do(self, kind: Kind, live: Live) -> None:
        machine, name = live.machine, live.record.id
        if machine is None or live.busy or live.record.state is not State.RUNNING:
            return  # something happened to it meanwhile
        log.warning("sandbox %s gives memory back: %s", name, kind)
        try:
            if kind == "page_out":
                await asyncio.to_thread(page_out, machine.pid)
            elif kind == "refresh":
                await self._refreshing.refresh(name)
            else:
                await self._pausing.pause(name)
        except AenvError as error:  # nobody waits for it; another sandbox gives more
            log.warning("sandbox %s does not give memory back: %s", name, error)


def host_memory() -> Host:
    """The host's memory now."""
    return Host(meminfo_mib("MemAvailable"), meminfo_mib("SwapFree"), _stalled())


def _stalled() -> float | None:
    with suppress(OSError):  # a kernel without pressure stall information
        for line in _PRESSURE.read_text().splitlines():
            what, *values = line.split()
            if what == "full":
                return float(dict(value.split("=") for value in values)["avg10"])
    return None
