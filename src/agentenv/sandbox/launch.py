"""From a record to a running machine, and back to nothing."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from agentenv.network.slot import Slot
from agentenv.sandbox.agent import Identity, unless_exit
from agentenv.sandbox.live import Live
from agentenv.sandbox.parts import GuestFilesSource, Slots, Template
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.records import Sandbox
from agentenv.vmm.machine import GuestFiles, Hypervisor, Layer, Machine, MachineSpec, Nic


class AgentClient(Protocol):
    """What a launch asks of the guest's agent; see agent.Agent."""

    async def wait_ready(self, machine: Machine, limit_s: float) -> None: ...
    async def init(self, identity: Identity) -> None: ...
    async def close(self) -> None: ...


class Launcher:
    """Makes machines out of records and templates."""

    def __init__(
        self,
        hypervisor: Hypervisor,
        slots: Slots,
        guest_files: GuestFilesSource,
        agent_at: Callable[[str], AgentClient],
        *,
        boot_timeout_s: float,
    ) -> None:
        self._hypervisor = hypervisor
        self._slots = slots
        self._guest_files = guest_files
        self._agent_at = agent_at
        self._boot_timeout_s = boot_timeout_s

    async def launch(
        self, live: Live, template: Template, phases: Phases, commit: Callable[[Sandbox], None]
    ) -> None:
        """Boot a machine for a sandbox and return once its agent knows who it is.

        Slot and machine are in `live` from the moment they exist: on failure, cancellation included,
        the caller releases them. `commit` is given the record with slot and specification before the
        machine is made.
        """
        with phases("slot"):
            live.slot = slot = await self._slots.acquire(live.record.id)
        spec = machine_spec(live.record, template, slot, self._guest_files())
        commit(replace(live.record, slot=slot, machine=spec))
        with phases("boot"):
            live.machine = machine = await self._hypervisor.boot(spec)
        agent = self._agent_at(slot.address)
        try:
            with phases("agent"):
                await agent.wait_ready(machine, self._boot_timeout_s)
            with phases("init"):
                await unless_exit(machine, agent.init(new_identity(live.record, template)))
        finally:
            await agent.close()

    async def release(self, live: Live) -> None:
        """End the machine and then free its slot; the slot stays taken while the machine may use it.

        May be repeated after a failure.
        """
        if live.machine is not None:
            await live.machine.end()
            live.machine = None
        if live.slot is not None:
            await self._slots.release(live.slot)
            live.slot = None


def machine_spec(record: Sandbox, template: Template, slot: Slot, guest: GuestFiles) -> MachineSpec:
    """The machine for a sandbox's first generation; its id is the sandbox's."""
    return MachineSpec(
        id=record.id,
        vcpus=record.vcpus,
        memory_mib=record.memory_mib,
        disk_mib=record.disk_mib,
        guest=guest,
        layers=(Layer(template.rootfs, "raw"),),
        nic=Nic(slot.namespace, slot.tap, slot.mac),
        uid=slot.uid,
    )


def new_identity(record: Sandbox, template: Template) -> Identity:
    """Who the guest is from now on. The sandbox's variables win over its template's."""
    return Identity(
        sandbox_id=record.id,
        template_id=record.template.id,
        hostname=record.id,
        machine_id=secrets.token_hex(16),
        env={**template.env, **record.env},
        access_token=record.access_token,
        default_user=template.default_user,
        default_workdir=template.default_workdir,
    )
