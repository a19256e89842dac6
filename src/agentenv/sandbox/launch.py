"""From a record to a running machine, and back to nothing."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from agentenv.network.slot import Slot
from agentenv.sandbox.agent import Identity, unless_exit
from agentenv.sandbox.parts import GuestFilesSource, Slots, Template
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.records import Sandbox
from agentenv.vmm.machine import GuestFiles, Hypervisor, Layer, Machine, MachineSpec, Nic

log = logging.getLogger(__name__)


class AgentClient(Protocol):
    """What a launch asks of the guest's agent; see agent.Agent."""

    async def wait_ready(self, machine: Machine, limit_s: float) -> None: ...
    async def init(self, identity: Identity) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class Launched:
    """A machine whose agent has answered and knows who it is, and the slot it uses."""

    machine: Machine
    slot: Slot


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
        self, record: Sandbox, template: Template, phases: Phases, note: Callable[[Slot, MachineSpec], None]
    ) -> Launched:
        """Boot a machine for `record` and wait until its agent is ready.

        `note` is called with slot and specification before the machine is made, to record them.
        On failure, cancellation included, everything is released before the error goes on.
        """
        async with AsyncExitStack() as on_failure:
            with phases("slot"):
                slot = await self._slots.acquire(record.id)
            on_failure.push_async_callback(self._slots.release, slot)
            spec = machine_spec(record, template, slot, self._guest_files())
            note(slot, spec)
            with phases("boot"):
                machine = await self._hypervisor.boot(spec)
            on_failure.push_async_callback(machine.end)
            agent = self._agent_at(slot.address)
            async with AsyncExitStack() as always:
                always.push_async_callback(agent.close)
                with phases("agent"):
                    await agent.wait_ready(machine, self._boot_timeout_s)
                with phases("init"):
                    await unless_exit(machine, agent.init(new_identity(record, template)))
            on_failure.pop_all()
            return Launched(machine, slot)

    async def release(self, machine: Machine | None, slot: Slot | None) -> None:
        """End the machine and then free its slot; the slot stays taken while the machine may use it."""
        if machine is not None:
            await machine.end()
        if slot is not None:
            await self._slots.release(slot)


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
