"""From a record and a snapshot to a running machine, and back to nothing."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

from agentenv.errors import AenvError
from agentenv.guestimage.initramfs import SYSTEMD
from agentenv.limits import Limits, NetworkLimits
from agentenv.network.policy import Policy
from agentenv.network.slot import Slot
from agentenv.sandbox.agent import Identity
from agentenv.sandbox.live import Live
from agentenv.sandbox.parts import GuestFilesSource, Slots
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.records import Sandbox
from agentenv.sandbox.transitions import State
from agentenv.snapshot.records import Init, Resources, Snapshot
from agentenv.snapshot.store import Snapshots
from agentenv.vmm.machine import Drive, GuestFiles, Hypervisor, Layer, Machine, MachineSpec, Nic

log = logging.getLogger(__name__)

# A machine held ready answers in some milliseconds; one that does not is given up for another.
POOLED_LIMIT_S = 10.0


class AgentClient(Protocol):
    """What is asked of the guest's agent; see agent.Agent."""

    async def wait_ready(self, machine: Machine, limit_s: float) -> None: ...
    async def take_over(self, machine: Machine, identity: Identity, limit_s: float) -> None: ...
    async def health(self) -> None: ...
    async def rehearse(self, *, user: str, token: str) -> None: ...
    async def freeze(self) -> None: ...
    async def thaw(self) -> None: ...
    async def close(self) -> None: ...


class Pooled(Protocol):
    """A machine held ready; see pool.Pooled."""

    @property
    def machine(self) -> Machine: ...
    @property
    def slot(self) -> Slot: ...
    @property
    def agent(self) -> AgentClient: ...


class Ready(Protocol):
    """Where machines are held ready; see pool.Pool."""

    def take(self, snapshot: Snapshot) -> Pooled | None: ...
    def launching(self) -> AbstractContextManager[None]: ...


class Launcher:
    """Makes machines out of records and snapshots."""

    def __init__(
        self,
        hypervisor: Hypervisor,
        slots: Slots,
        snapshots: Snapshots,
        guest_files: GuestFilesSource,
        agent_at: Callable[[str], AgentClient],
        *,
        boot_timeout_s: float,
        resume_timeout_s: float,
        ready: Ready | None = None,
    ) -> None:
        self._ready = ready
        self.hypervisor = hypervisor
        self.slots = slots
        self.snapshots = snapshots
        self.guest_files = guest_files
        self.agent_at = agent_at
        self.boot_timeout_s = boot_timeout_s
        self.resume_timeout_s = resume_timeout_s

    async def launch(
        self,
        live: Live,
        snapshot: Snapshot,
        identity: Identity,
        phases: Phases,
        commit: Callable[[Sandbox], None],
        *,
        memory: bool = True,
    ) -> None:
        """Start a machine for a sandbox from a snapshot and return once its agent knows who it is. One that
        was held ready is taken, if there is one.

        Without `memory`, or where the snapshot has none, it boots from the snapshot's disk. A slot that
        the sandbox has already is used. Slot and machine are in `live` from the moment they exist: on
        failure, cancellation included, the caller releases them. `commit` is given the record with slot
        and specification before the machine is made.

        Raises:
            Incompatible: the snapshot's memory cannot be restored here. StoreCorrupt: a file of it is
                damaged or missing. CapacityExceeded, GuestFault, HostFault, StoreFault: it cannot start.
        """
        with self._ready.launching() if self._ready else nullcontext():
            if not memory or not await self._take_ready(live, snapshot, identity, phases, commit):
                await self._start(live, snapshot, identity, phases, commit, memory)

    async def _start(
        self,
        live: Live,
        snapshot: Snapshot,
        identity: Identity,
        phases: Phases,
        commit: Callable[[Sandbox], None],
        memory: bool,
    ) -> None:
        """Start a machine anew; see `launch`."""
        if live.slot is None:
            with phases("slot"):
                live.slot = await self.slots.acquire(live.record.id)
        slot = live.slot
        self.snapshots.require_files(snapshot)
        saved = self.snapshots.saved(snapshot) if memory else None
        record = live.record
        # A new sandbox of a template gets the agent in force: the snapshot is made anew if it has another.
        new = snapshot.kind == "template" and record.state is State.CREATING
        guest = self.guest_files(None if new or not saved else snapshot.fingerprint)
        drives = self.snapshots.drives(record.drives_on(snapshot))
        layers = self.snapshots.layers(snapshot)
        spec = spec_of(record.id, record.resources, slot, layers, guest, record.guest.init, drives=drives)
        fingerprint = None if saved else await self.hypervisor.fingerprint(spec)
        commit(replace(live.record, slot=slot, machine=spec, fingerprint=fingerprint))
        if saved:
            async with self._rules(live, slot, phases):
                with phases("restore"):
                    live.machine = await self.hypervisor.restore(
                        spec, saved, fingerprint=snapshot.fingerprint
                    )
            await self._limit_disk(live, phases)
            with phases("run"):
                await live.machine.run()
        else:
            async with self._rules(live, slot, phases):
                pass
            with phases("boot"):
                live.machine = await self.hypervisor.boot(spec)
            await self._limit_disk(live, phases)
        agent = self.agent_at(slot.address)
        limit_s = self.resume_timeout_s if saved else self.boot_timeout_s
        try:
            with phases("agent"):
                await agent.take_over(live.machine, identity, limit_s)
        finally:
            await agent.close()

    async def _take_ready(
        self,
        live: Live,
        snapshot: Snapshot,
        identity: Identity,
        phases: Phases,
        commit: Callable[[Sandbox], None],
    ) -> bool:
        """Start with a machine that was held ready; False when there is none that will do."""
        if self._ready is None or live.slot is not None or not fits(live.record, snapshot):
            return False
        pooled = self._ready.take(snapshot)
        if pooled is None:
            return False
        live.machine, live.slot = pooled.machine, pooled.slot
        try:
            self.slots.hand_over(pooled.slot, live.record.id)
            spec = pooled.machine.spec
            commit(replace(live.record, slot=pooled.slot, machine=spec, fingerprint=None))
            async with self._rules(live, pooled.slot, phases):
                await self._limit_disk(live, phases)
            with phases("run"):
                await pooled.machine.run()
            with phases("agent"):
                await pooled.agent.take_over(pooled.machine, identity, POOLED_LIMIT_S)
            return True
        except AenvError as error:  # another one is started in its place
            log.warning("sandbox %s: a machine held ready is of no use: %s", live.record.id, error)
            await self.release(live)
            return False
        finally:
            await pooled.agent.close()

    @asynccontextmanager
    async def _rules(self, live: Live, slot: Slot, phases: Phases) -> AsyncIterator[None]:
        """Have what the sandbox may reach, and how fast, in force when the block is over, by doing it
        beside: the kernel takes some milliseconds for either."""
        policy, limits = live.record.network.policy, live.record.limits.network
        applying = asyncio.ensure_future(self._close_in(slot, policy, limits))
        try:
            yield
            if limits or not policy.unrestricted:
                with phases("rules"):
                    await applying
        finally:
            await asyncio.gather(applying, return_exceptions=True)
        applying.result()

    async def _close_in(self, slot: Slot, policy: Policy, limits: NetworkLimits) -> None:
        await self.slots.apply(slot, policy)
        if limits:  # the slot has none, or those that it had before
            await self.slots.limit(slot, limits)

    async def limit(self, live: Live, limits: Limits) -> None:
        """Put limits in force, whatever there was before.

        Raises:
            HostFault: they cannot be; some of them may be in force.
        """
        if live.slot is not None:
            await self.slots.limit(live.slot, limits.network)
        if live.machine is not None:
            await live.machine.limit_disk(limits.disk)

    async def _limit_disk(self, live: Live, phases: Phases) -> None:
        """For a machine that is new: there is nothing to lift."""
        if live.machine is not None and live.record.limits.disk:
            with phases("limits"):
                await live.machine.limit_disk(live.record.limits.disk)

    async def release(self, live: Live) -> None:
        """End the machine and then free its slot; the slot stays taken while the machine may use it.

        May be repeated after a failure.
        """
        await self.end_machine(live)
        if live.slot is not None:
            await self.slots.release(live.slot)
            live.slot = None

    async def end_machine(self, live: Live) -> None:
        """End the machine and keep the slot. Repeatable."""
        if live.machine is not None:
            await live.machine.end()
            live.machine = None


def spec_of(
    machine_id: str,
    resources: Resources,
    slot: Slot,
    layers: tuple[Layer, ...],
    guest: GuestFiles,
    init: Init = "agent",
    *,
    drives: tuple[Drive, ...] = (),
) -> MachineSpec:
    """A machine in a slot, above disk layers; `init` is its process 1 if it boots."""
    return MachineSpec(
        id=machine_id,
        vcpus=resources.vcpus,
        memory_mib=resources.memory_mib,
        disk_mib=resources.disk_mib,
        guest=guest,
        layers=layers,
        nic=Nic(slot.namespace, slot.tap, slot.mac),
        uid=slot.uid,
        words=(SYSTEMD,) if init == "systemd" else (),
        drives=drives,
    )


def fits(record: Sandbox, snapshot: Snapshot) -> bool:
    """Whether a machine of a snapshot is as the sandbox is to be, with nothing added."""
    return not record.drives and record.resources == snapshot.resources


def full_identity(record: Sandbox) -> Identity:
    """All that the guest is to know, for a machine that was somebody else or has just booted."""
    return Identity(
        sandbox_id=record.id,
        template_id=record.template.id,
        hostname=record.id,
        machine_id=record.machine_id or None,
        env=record.guest.env,
        access_token=record.access_token or "",
        default_user=record.guest.default_user,
        default_workdir=record.guest.default_workdir,
    )


def identity_after(record: Sandbox, snapshot: Snapshot, *, memory: bool) -> Identity:
    """What the guest is to be told when it starts from `snapshot`: nothing that it still knows."""
    remembers = memory and snapshot.memory is not None
    if remembers and snapshot.sandbox_id == record.id:
        return Identity()
    mounted = len(snapshot.drives) if remembers else 0
    grown = record.disk_mib != snapshot.resources.disk_mib
    return replace(
        full_identity(record),
        drives={place: drive for place, drive in enumerate(record.drives) if place >= mounted},
        disk_mib=record.disk_mib if grown else None,
    )


def new_machine_id() -> str:
    """A machine-id as of systemd: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def inherited(env: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """A guest's variables: what it was started from had, and what the sandbox was given, which wins."""
    return {**env, **given}
