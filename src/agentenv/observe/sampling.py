"""Samples of all sandboxes that run, taken every few seconds.

Processor time is the machine's, seen from the host. Memory and disk are what the guest's agent says: only the
guest knows what of its memory is in use. It is asked when its sandbox has done something, and when somebody
wants its figures; an idle one is left alone, since its figures are what they were.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from agentenv.errors import AenvError
from agentenv.observe.samples import Guest, Histories, Sample, cpu_pct, host_guess
from agentenv.sandbox.agent import Agent
from agentenv.sandbox.observing import ENDINGS, Happening, Observer, Running
from agentenv.vmm.usage import Usage, usages

log = logging.getLogger(__name__)

SAMPLE_EVERY_S = 5.0
ASK_LIMIT_S = 2.0
ASKED_AT_ONCE = 4
SILENT_S = 60.0  # for which one that did not answer is left alone, or many such would hold all others up
# Processors' worth of time below which a guest did nothing worth asking about; a question takes less.
BUSY = 0.02
# The kernel counts processor time in hundredths: a share of less than this says nothing.
LEAST_S = 1.0

Ask = Callable[[Running], Awaitable[Mapping[str, object]]]
Read = Callable[[Iterable[int]], Mapping[int, Usage]]


async def ask_agent(running: Running) -> Mapping[str, object]:
    """The figures of a guest by its agent, on a connection of their own."""
    agent = Agent(running.address)
    try:
        async with asyncio.timeout(ASK_LIMIT_S):
            return await agent.figures(running.sandbox.access_token)
    finally:
        await agent.close()


@dataclass
class _Known:
    """What was seen of one machine last; `at` by the monotonic clock."""

    pid: int
    at: float
    cpu_s: float
    guest: Guest | None = None
    share: float = 0.0
    ask_at: float = 0.0
    taking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sampler(Observer):
    """Takes samples of what `running` names.

    Args:
        running: the sandboxes with a machine.
        histories: where samples go.
        ask: asks a guest.
        read: reads what processes use.
        clock: seconds, of whatever beginning.
    """

    def __init__(
        self,
        running: Callable[[], Iterable[Running]],
        histories: Histories,
        *,
        ask: Ask = ask_agent,
        read: Read = usages,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running = running
        self._histories = histories
        self._ask = ask
        self._read = read
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take samples."""
        self._task = asyncio.create_task(self._go_on(), name="samples")

    async def stop(self) -> None:
        """Take no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def happened(self, happening: Happening) -> None:
        if happening.change in ENDINGS:
            self._known.pop(happening.sandbox.id, None)
            self._histories.end(happening.sandbox.id)

    async def _go_on(self) -> None:
        while True:
            try:
                await self.look()
            except OSError as error:  # as for want of descriptors; the next look may do
                log.warning("no figures of sandboxes were read: %s", error)
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def look(self) -> None:
        """Take one sample of each."""
        running = {each.sandbox.id: each for each in self._running()}
        for name in self._known.keys() - running.keys():
            del self._known[name]
        used = await asyncio.to_thread(self._read, [each.pid for each in running.values()])
        await asyncio.gather(
            *(self._take(each, used[each.pid], wanted=False) for each in running.values() if each.pid in used)
        )

    async def look_at(self, sandbox_id: str) -> None:
        """Take a sample of one, unless there is one that is young."""
        each = next((one for one in self._running() if one.sandbox.id == sandbox_id), None)
        last = self._histories.last(sandbox_id)
        if each is None or (last is not None and 0 <= time.time() - last.at < SAMPLE_EVERY_S):
            return
        used = self._read([each.pid]).get(each.pid)
        if used is not None:
            await self._take(each, used, wanted=True)

    async def _take(self, running: Running, used: Usage, *, wanted: bool) -> None:
        sandbox, now = running.sandbox, self._clock()
        known = self._known.get(sandbox.id)
        if known is None or known.pid != running.pid:
            guest = None if known is None else known.guest  # as before a pause
            known = self._known[sandbox.id] = _Known(running.pid, now, used.cpu_s, guest)
            fresh = True
        else:
            fresh = False
        spent, elapsed = used.cpu_s - known.cpu_s, now - known.at
        if fresh or elapsed >= LEAST_S:
            known.at, known.cpu_s = now, used.cpu_s
            known.share = cpu_pct(spent, elapsed, sandbox.vcpus)
        due = fresh or (spent > BUSY * elapsed and now >= known.ask_at)
        if (wanted or due) and not running.busy:
            await self._ask_guest(running, known)
        guest = known.guest or host_guess(sandbox, used.resident)
        if self._known.get(sandbox.id) is known:  # it has not ended meanwhile
            self._histories.add(sandbox.id, Sample(time.time(), known.share, sandbox.vcpus, *guest))

    async def _ask_guest(self, running: Running, known: _Known) -> None:
        if known.taking.locked():  # it is being asked already
            async with known.taking:
                return
        async with known.taking, self._asking:
            try:
                known.guest = Guest.of(await self._ask(running), running.sandbox)
            except (AenvError, OSError):  # a guest that does not answer: what it said before holds
                known.ask_at = self._clock() + SILENT_S
