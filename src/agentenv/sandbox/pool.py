"""Machines restored before anybody asks for them, and the keeping of as many as demand wants.

A machine of a template's snapshot is also warmed: it has run until its agent answered, and was told who
it is, by way of rehearsal. Under software emulation that is nearly all of a start's cost, since every
process translates the guest's code anew. Then its vcpus are stopped until somebody takes it. Machines
of other snapshots are restored and do not run: what goes on in them is not ours to set going.

What to make and drop is decided in `pool_plan`, at every take, whenever something is finished, and from
time to time. A pool's machines and slots are recorded under their own ids, which no sandbox has, so the
next start of a node reaps them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentenv.config import Settings
from agentenv.errors import AenvError
from agentenv.network.ahead import SlotsAhead
from agentenv.network.slot import Slot
from agentenv.sandbox.admission import Admission, Need
from agentenv.sandbox.agent import Identity, unless_exit
from agentenv.sandbox.launch import AgentClient, spec_of
from agentenv.sandbox.parts import Clock, GuestFilesSource
from agentenv.sandbox.pool_plan import Bounds, Shelf, SlotShelf, plan
from agentenv.snapshot.holds import Hold
from agentenv.snapshot.records import Snapshot
from agentenv.vmm.machine import Hypervisor, Layer, Machine, SavedState

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 5.0
# The machine just taken has the processors for itself first.
REFILL_AFTER_S = 0.2
RETRY_S = (5.0, 300.0)
REMEMBERED = 1024
# Those that more than one sandbox may start from.
KINDS = ("template", "checkpoint")


class Source(Protocol):
    """What a pool needs of the snapshots; see snapshot.store.Snapshots."""

    def find(self, name_or_id: str) -> Snapshot | None: ...
    def saved(self, record: Snapshot) -> SavedState | None: ...
    def layers(self, record: Snapshot) -> tuple[Layer, ...]: ...
    def require_files(self, record: Snapshot) -> None: ...
    def keep(self, record: Snapshot) -> Hold: ...


@dataclass(frozen=True)
class Pooled:
    """A machine that waits to `run`, its slot, and a client of its agent that may be connected. The slot
    is recorded for the machine's own id."""

    machine: Machine
    slot: Slot
    agent: AgentClient
    warmed: bool


@dataclass
class _Ready:
    pooled: Pooled
    hold: Hold


@dataclass
class _Stock:
    """One snapshot's shelf."""

    snapshot: Snapshot
    ready: deque[_Ready] = field(default_factory=deque)
    making: int = 0
    asked: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    failures: int = 0
    retry_at: float = 0.0


class Pool:
    """The machines that a node holds ready, and its spare slots.

    Args:
        admission: lends what the pool holds; told to give back, it does.
        bounds: between which sizes follow demand.
        at_once: how many machines are made at a time.
        ready_limit_s: until when a machine being warmed has to have answered, in seconds.
    """

    def __init__(
        self,
        hypervisor: Hypervisor,
        slots: SlotsAhead,
        admission: Admission,
        snapshots: Source,
        guest_files: GuestFilesSource,
        agent_at: Callable[[str], AgentClient],
        *,
        bounds: Bounds,
        clock: Clock,
        at_once: int = 1,
        ready_limit_s: float = 60.0,
    ) -> None:
        self._hypervisor = hypervisor
        self._slots = slots
        self._admission = admission
        self._snapshots = snapshots
        self._guest_files = guest_files
        self._agent_at = agent_at
        self._bounds = bounds
        self._clock = clock
        self._at_once = at_once
        self._ready_limit_s = ready_limit_s
        self._stocks: dict[str, _Stock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._makers: set[asyncio.Task[None]] = set()
        self._cancel_timer: Callable[[], None] | None = None
        self._due_at = float("inf")
        self._launching = 0
        self._open = False
        self.given = self.missed = 0  # machines, of those that were asked for

    def start(self) -> None:
        """Begin to keep stock."""
        self._open = True
        self._admission.on_pressure(self._look)
        self._slots.on_asked = self._look_soon
        self._look()

    async def stop(self) -> None:
        """End all that is held ready; nothing is made or handed out any more."""
        self._open = False
        self._set_timer(None)
        for task in self._makers:
            task.cancel()
        for stock in self._stocks.values():
            while stock.ready:
                self._drop(stock.ready.pop())
        while self._tasks | self._makers:
            await asyncio.wait(self._tasks | self._makers)
        for _ in range(self._slots.spare):
            await self._drop_slot()

    def take(self, snapshot: Snapshot) -> Pooled | None:
        """A machine of that snapshot, if one is ready, and a note that one was asked for. The caller has
        reserved what it takes and keeps the snapshot's files; the machine and its slot are the caller's
        to release from now on."""
        if not self._open or self._bounds.most == 0 or snapshot.memory is None or snapshot.kind not in KINDS:
            return None
        stock = self._stocks.setdefault(snapshot.id, _Stock(snapshot))
        stock.asked.append(self._clock.now())
        self._look_soon()
        while stock.ready:
            ready = stock.ready.popleft()
            if ready.pooled.machine.exited:
                self._drop(ready)
                continue
            self._admission.release(ready.pooled.machine.spec.id)
            ready.hold.release()
            self.given += 1
            return ready.pooled
        self.missed += 1
        return None

    @contextmanager
    def launching(self) -> Iterator[None]:
        """While somebody starts a machine that is waited for, none is made for the shelf: it would take the
        processors away."""
        self._launching += 1
        try:
            yield
        finally:
            self._launching -= 1
            if not self._launching:
                self._look_soon()

    def forget(self, snapshot_id: str) -> None:
        """A snapshot is deleted or replaced: drop its machines."""
        stock = self._stocks.pop(snapshot_id, None)
        while stock is not None and stock.ready:
            self._drop(stock.ready.pop())

    def ready(self, snapshot_id: str) -> int:
        """How many machines of a snapshot are ready."""
        stock = self._stocks.get(snapshot_id)
        return len(stock.ready) if stock is not None else 0

    @property
    def count(self) -> int:
        """How many machines are ready in all."""
        return sum(len(stock.ready) for stock in self._stocks.values())

    @property
    def making(self) -> int:
        """How many are being made."""
        return len(self._makers)

    @property
    def slots_spare(self) -> int:
        """How many slots are made ahead."""
        return self._slots.spare

    @property
    def slots_free(self) -> int:
        """How many more can be made."""
        return self._slots.free

    @property
    def known(self) -> frozenset[str]:
        """The snapshots that were started from lately."""
        return frozenset(self._stocks)

    # Deciding

    def _look_soon(self) -> None:
        if self._open:
            self._set_timer(REFILL_AFTER_S)

    def _look(self) -> None:
        """Compare what is held with what demand wants, and begin to do what follows."""
        if not self._open:
            return
        self._tidy()
        now = self._clock.now()
        slots = SlotShelf(self._slots.spare, self._slots.making, tuple(self._slots.asked), self._slots.free)
        shelves = [self._shelf(stock, now) for stock in self._stocks.values()]
        found = plan(now, shelves, slots, self._admission.room, self._bounds)
        for snapshot_id, number in found.drop.items():
            for _ in range(number):
                self._drop(self._stocks[snapshot_id].ready.pop())
        for _ in range(found.drop_slots):
            self._begin(self._drop_slot())
        if found.make_slots and self._slots.making == 0:
            self._begin(self._make_slots(found.make_slots))
        for snapshot_id, number in found.make.items() if not self._launching else ():
            for _ in range(min(number, self._at_once - len(self._makers))):
                self._begin_making(self._stocks[snapshot_id])
        self._set_timer(LOOK_AGAIN_S)

    def _tidy(self) -> None:
        """Drop machines that died, and forget snapshots that are gone or that nobody starts from any more."""
        forgotten = self._clock.now() - self._bounds.keep_s
        for stock in list(self._stocks.values()):
            if not stock.ready and not stock.making:  # its record need not be looked up
                if stock.asked[-1] <= forgotten:
                    del self._stocks[stock.snapshot.id]
                continue
            if self._snapshots.find(stock.snapshot.id) is None:
                self.forget(stock.snapshot.id)
                continue
            dead = [ready for ready in stock.ready if ready.pooled.machine.exited]
            for ready in dead:
                stock.ready.remove(ready)
                self._drop(ready)

    def _shelf(self, stock: _Stock, now: float) -> Shelf:
        # A checkpoint that is started from once mostly is never again.
        seldom = stock.snapshot.kind != "template" and len(stock.asked) < 2
        return Shelf(
            stock.snapshot.id,
            need_of(stock.snapshot),
            len(stock.ready),
            stock.making,
            () if seldom else tuple(stock.asked),
            held_back=now < stock.retry_at,
        )

    def _set_timer(self, delay_s: float | None) -> None:
        """Look again then, unless an earlier look is due."""
        due_at = float("inf") if delay_s is None else self._clock.now() + delay_s
        if delay_s is not None and self._cancel_timer is not None and self._due_at <= due_at:
            return
        if self._cancel_timer is not None:
            self._cancel_timer()
        self._due_at = due_at
        self._cancel_timer = None if delay_s is None else self._clock.call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._cancel_timer = None
        self._look()

    # Doing

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin_making(self, stock: _Stock) -> None:
        stock.making += 1
        task = asyncio.create_task(self._make(stock), name=f"pool {stock.snapshot.id}")
        self._makers.add(task)
        task.add_done_callback(self._made)

    def _made(self, task: asyncio.Task[None]) -> None:
        self._makers.discard(task)
        self._look()

    async def _make(self, stock: _Stock) -> None:
        """One machine more on a shelf, or a pause before the next attempt."""
        try:
            ready = await self._restore_on_loan(stock.snapshot)
        except AenvError as error:  # nobody waits for it: whoever takes one restores it himself, and hears
            pause = min(RETRY_S[0] * 2**stock.failures, RETRY_S[1])
            stock.failures += 1
            stock.retry_at = self._clock.now() + pause
            log.warning(
                "no machine of %s could be made ready, next in %g s: %s", stock.snapshot.id, pause, error
            )
            return
        finally:  # in one step with what follows: a machine is under way or ready, never both
            stock.making -= 1
        if ready is None:
            return
        stock.failures = 0
        if self._open and self._stocks.get(stock.snapshot.id) is stock:
            stock.ready.append(ready)
        else:
            self._drop(ready)

    async def _restore_on_loan(self, snapshot: Snapshot) -> _Ready | None:
        """A machine, unless there is no room for it or the snapshot is gone. On failure, or when cancelled,
        nothing is left of it."""
        found = self._snapshots.find(snapshot.id)
        if found is None:
            self.forget(snapshot.id)
            return None
        snapshot = found  # its layers may be others than when it was asked for first
        machine_id = "p" + secrets.token_hex(9)
        if not self._admission.lend(machine_id, need_of(snapshot)):
            return None
        hold = self._snapshots.keep(snapshot)
        try:
            return _Ready(await self._restore(snapshot, machine_id), hold)
        except BaseException:
            hold.release()
            self._admission.release(machine_id)
            raise

    async def _restore(self, snapshot: Snapshot, machine_id: str) -> Pooled:
        saved = self._snapshots.saved(snapshot)
        assert saved is not None, f"{snapshot.id} has no memory"
        self._snapshots.require_files(snapshot)
        slot = await self._slots.acquire_new(machine_id)
        machine = agent = None
        try:
            guest = self._guest_files(None if snapshot.kind == "template" else snapshot.fingerprint)
            spec = spec_of(machine_id, snapshot.resources, slot, self._snapshots.layers(snapshot), guest)
            machine = await self._hypervisor.restore(spec, saved, fingerprint=snapshot.fingerprint or None)
            agent = self._agent_at(slot.address)
            warm = snapshot.kind == "template"
            if warm:
                await self._warm(machine, agent, snapshot)
            return Pooled(machine, slot, agent, warm)
        except BaseException:
            await self._end(machine, slot, agent)
            raise

    async def _warm(self, machine: Machine, agent: AgentClient, snapshot: Snapshot) -> None:
        identity = rehearsal(snapshot, machine.spec.id)
        assert identity.access_token is not None
        await machine.run()
        await agent.take_over(machine, identity, self._ready_limit_s)
        command = agent.rehearse(user=snapshot.guest.default_user, token=identity.access_token)
        await unless_exit(machine, command)
        await unless_exit(machine, agent.health())  # answered when what was set going is done
        await machine.stop()

    def _drop(self, ready: _Ready) -> None:
        """Give a machine up. Its room counts as free from now on: it is, in a moment."""
        self._admission.release(ready.pooled.machine.spec.id)
        self._begin(self._discard(ready))

    async def _discard(self, ready: _Ready) -> None:
        await self._end(ready.pooled.machine, ready.pooled.slot, ready.pooled.agent)
        ready.hold.release()

    async def _end(self, machine: Machine | None, slot: Slot, agent: AgentClient | None) -> None:
        """Release a machine that nobody has. What resists keeps its record, for the next start."""
        try:
            if agent is not None:
                await agent.close()
            if machine is not None:
                await machine.end()
            await self._slots.release(slot)
        except AenvError as error:  # nobody waits for it, and the records tell of it
            log.error("of a machine that was held ready: %s", error)

    async def _make_slots(self, number: int) -> None:
        try:
            for _ in range(number):
                if self._open:
                    await self._slots.make()
        except AenvError as error:  # whoever needs one makes it, and hears of it
            log.warning("no network slot could be made ahead: %s", error)

    async def _drop_slot(self) -> None:
        try:
            await self._slots.drop()
        except AenvError as error:  # its record stays, and the next start removes it
            log.error("of a network slot made ahead: %s", error)


def bounds_of(settings: Settings) -> Bounds:
    """The bounds that the settings give."""
    return Bounds(
        least=min(settings.pool_least, settings.pool_most),
        most=settings.pool_most,
        total=settings.pool_total,
        slots_least=min(settings.slots_least, settings.slots_most),
        slots_most=settings.slots_most,
        keep_s=settings.pool_keep_s,
    )


def makers_of(settings: Settings) -> int:
    """How many machines are made ready at a time."""
    return settings.pool_at_once or max(1, (os.cpu_count() or 1) // 2)


def need_of(snapshot: Snapshot) -> Need:
    """What a machine of a snapshot takes of the node."""
    resources = snapshot.resources
    return Need.running(vcpus=resources.vcpus, memory_mib=resources.memory_mib, disk_mib=resources.disk_mib)


def rehearsal(snapshot: Snapshot, name: str) -> Identity:
    """An identity with all that a real one has, which replaces every part of it."""
    return Identity(
        sandbox_id=name,
        template_id=snapshot.template.id,
        hostname=name,
        machine_id=secrets.token_hex(16),
        env={},
        access_token=secrets.token_hex(32),
        default_user=snapshot.guest.default_user,
        default_workdir=snapshot.guest.default_workdir,
    )
