"""The machines that builds run in: started from a disk or from a snapshot, kept as snapshots on the way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from agentenv.building.steps import BUSYBOX, Works
from agentenv.errors import AenvError, CapacityExceeded, StoreFault, StoreFull
from agentenv.network.slot import Slot
from agentenv.sandbox.admission import Admission, Need
from agentenv.sandbox.agent import Identity
from agentenv.sandbox.core import IO_ERROR
from agentenv.sandbox.guest import Command, Guest
from agentenv.sandbox.launch import Launcher, spec_of
from agentenv.snapshot.records import Descent, GuestSettings, Init, Resources, Snapshot
from agentenv.snapshot.store import Snapshots
from agentenv.vmm.machine import Layer, Machine

log = logging.getLogger(__name__)

ROOM_AGAIN_S = 2.0
ROOM_LIMIT_S = 1800.0
END_TRIES = 5
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"

GuestAt = Callable[[Machine, str], Works]

# Nobody in particular: what a template's guest is until a sandbox is made of it.
NOBODY = Identity(env={}, access_token="", default_user="root", default_workdir="")


def new_bench_id() -> str:
    """`b` and 19 random base32 letters: no sandbox has such an id."""
    return "b" + "".join(secrets.choice(_ID_LETTERS) for _ in range(19))


class Bench:
    """One machine that a build works in; its agent has answered.

    Attributes:
        guest: what is done in it.
        trouble: why its hypervisor stopped it: its disk could not be written on the host. It is ended then,
            so that nobody waits for what will not go on.
        standing: the snapshot that it was started from, or that was made of it last; None for one that was
            booted.
    """

    def __init__(
        self, workshop: Workshop, machine: Machine, slot: Slot, guest: Works, resources: Resources
    ) -> None:
        self._workshop = workshop
        self._machine = machine
        self._slot = slot
        self.guest = guest
        self.resources = resources
        self.standing: Snapshot | None = None
        self.fingerprint: dict[str, str] = {}
        self.trouble: StoreFault | None = None
        self._ending: asyncio.Task[None] | None = None
        machine.on_event(self._note)

    @property
    def id(self) -> str:
        """The machine's."""
        return self._machine.spec.id

    async def keep(self, key: str, settings: GuestSettings, *, final: bool = False) -> Snapshot:
        """Make a snapshot of it as it is now, with all its guest wrote on its disk; with `final` the machine
        is of no use afterwards, and the snapshot survives the host.

        Raises:
            GuestFault, StoreFull, StoreFault, HostFault: it could not be made, and nothing of it is left.
        """
        snapshots = self._workshop.snapshots
        await self._sync()
        draft = snapshots.begin(self.id)
        try:
            await self._machine.stop()
            captured = await self._machine.capture(draft.path, final=final)
            contents = snapshots.describe(captured, self.standing)
            if not final:
                await self._machine.run()
            record = Snapshot(
                id=draft.id,
                kind="step",
                template=Descent("", "a step of a build", key),
                resources=self.resources,
                disk=contents.disk,
                created_at=self._workshop.now(),
                memory=contents.memory,
                state=contents.state,
                fingerprint=self.fingerprint,
                guest=settings,
                parent=self.standing.id if self.standing else None,
                folds=contents.folds,
            )
            made = await snapshots.publish(draft, record, durable=final)
        except BaseException:
            await snapshots.abandon(draft)
            raise
        self.standing = made
        return made

    def _note(self, event: str, data: dict[str, object]) -> None:
        if event != IO_ERROR or data.get("action") != "stop" or self.trouble is not None:
            return
        reason = str(data.get("reason", "a disk error"))
        kind = StoreFull if data.get("nospace") else StoreFault
        self.trouble = kind(f"the disk of the build's machine cannot be written: {reason}")
        log.error("build machine %s: %s", self.id, self.trouble)
        self._ending = asyncio.create_task(self._machine.end(), name=f"end {self.id}")

    async def _sync(self) -> None:
        """Have all that was written on the guest's disk: it may be booted from one day."""
        await self.guest.run(Command((BUSYBOX, "sync"), "root", "/"), lambda _stream, _data: None)


class Workshop:
    """Makes benches.

    Args:
        launcher: hypervisor, slots, and the guest's files.
        snapshots: what benches are started from and kept as.
        admission: where a bench's room is taken.
        now: the clock, seconds since the epoch.
        guest_at: how a machine's guest is reached.
    """

    def __init__(
        self,
        launcher: Launcher,
        snapshots: Snapshots,
        admission: Admission,
        now: Callable[[], float],
        guest_at: GuestAt = Guest,
    ) -> None:
        self.launcher = launcher
        self.snapshots = snapshots
        self.now = now
        self._admission = admission
        self._guest_at = guest_at

    @asynccontextmanager
    async def booted(
        self,
        resources: Resources,
        layers: tuple[Layer, ...],
        init: Init = "agent",
        *,
        grows: bool = False,
    ) -> AsyncIterator[Bench]:
        """A machine that has booted from disk layers; it is ended with the block. With `grows` its filesystem
        is smaller than its disk, and grows to that.

        Raises:
            CapacityExceeded: there was no room for long. GuestFault, HostFault, StoreFault: it cannot be
                started.
        """
        async with (
            self._room(resources) as bench_id,
            self._bench(bench_id, resources, layers, None, init, grows=grows) as bench,
        ):
            yield bench

    @asynccontextmanager
    async def restored(self, snapshot: Snapshot) -> AsyncIterator[Bench]:
        """A machine that goes on from a snapshot; it is ended with the block.

        Raises:
            Incompatible: the snapshot was taken on another host or hypervisor. StoreCorrupt: it is damaged.
            CapacityExceeded, GuestFault, HostFault, StoreFault: as `booted`.
        """
        hold = self.snapshots.keep(snapshot)
        try:
            self.snapshots.require_files(snapshot)
            layers = self.snapshots.layers(snapshot)
            async with (
                self._room(snapshot.resources) as bench_id,
                self._bench(bench_id, snapshot.resources, layers, snapshot) as bench,
            ):
                yield bench
        finally:
            hold.release()

    @asynccontextmanager
    async def _room(self, resources: Resources) -> AsyncIterator[str]:
        """The id of a machine that there is room for, waited for if need be."""
        bench_id = new_bench_id()
        need = Need.running(
            vcpus=resources.vcpus, memory_mib=resources.memory_mib, disk_mib=resources.disk_mib
        )
        async with contextlib.AsyncExitStack() as undo:
            await self._reserve(bench_id, need)
            undo.callback(self._admission.release, bench_id)
            yield bench_id

    async def _reserve(self, bench_id: str, need: Need) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ROOM_LIMIT_S
        while True:
            try:
                self._admission.reserve(bench_id, need)
                return
            except CapacityExceeded:
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(ROOM_AGAIN_S)  # room is also the host's own, of which nobody tells

    @asynccontextmanager
    async def _bench(
        self,
        bench_id: str,
        resources: Resources,
        layers: tuple[Layer, ...],
        snapshot: Snapshot | None,
        init: Init = "agent",
        *,
        grows: bool = False,
    ) -> AsyncIterator[Bench]:
        launcher = self.launcher
        slot = await launcher.slots.acquire(bench_id)
        machine: Machine | None = None
        try:
            spec = spec_of(bench_id, resources, slot, layers, launcher.guest_files(), init)
            saved = snapshot and self.snapshots.saved(snapshot)
            if saved and snapshot:
                machine = await launcher.hypervisor.restore(spec, saved, fingerprint=snapshot.fingerprint)
                await machine.run()
            else:
                machine = await launcher.hypervisor.boot(spec)
            self._admission.commit(bench_id)
            log.info("build machine %s is %s", bench_id, "restored" if saved else "booted")
            identity = replace(NOBODY, disk_mib=resources.disk_mib if grows else None)
            limit_s = launcher.resume_timeout_s if saved else launcher.boot_timeout_s
            await self._take_over(machine, slot, identity, limit_s)
            bench = Bench(self, machine, slot, self._guest_at(machine, slot.address), resources)
            if saved and snapshot:
                bench.standing, bench.fingerprint = snapshot, snapshot.fingerprint
            else:
                bench.fingerprint = await launcher.hypervisor.fingerprint(spec)
            yield bench
        finally:
            await asyncio.shield(asyncio.ensure_future(self._end(machine, slot)))

    async def _take_over(self, machine: Machine, slot: Slot, identity: Identity, limit_s: float) -> None:
        agent = self.launcher.agent_at(slot.address)
        try:
            await agent.take_over(machine, identity, limit_s)
        finally:
            await agent.close()

    async def _end(self, machine: Machine | None, slot: Slot) -> None:
        """End a machine and free its slot, tried again when that fails: the next start reaps what is left."""
        for left in reversed(range(END_TRIES)):
            try:
                if machine is not None:
                    await machine.end()
                await self.launcher.slots.release(slot)
                return
            except AenvError as error:
                log.warning("the machine of a build is not released yet: %s", error)
                if left:
                    await asyncio.sleep(ROOM_AGAIN_S)
