"""What a starting node makes of the records of its earlier life: adopt, or end and reap."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from agentenv.errors import AenvError
from agentenv.network.slot import Slot
from agentenv.sandbox.parts import Slots
from agentenv.sandbox.records import Records, Sandbox
from agentenv.sandbox.transitions import ENDS, REACHABLE, State, recover
from agentenv.vmm.machine import Hypervisor, Machine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adopted:
    """A sandbox that goes on, with its machine and slot unless it is paused."""

    record: Sandbox
    machine: Machine | None
    slot: Slot | None


async def recover_all(
    records: Records, hypervisor: Hypervisor, slots: Slots, *, boot_id: str, now: float
) -> list[Adopted]:
    """Adopt what still runs, give every other record its end, and reap what is left over."""
    found = await asyncio.gather(
        *(_recover_one(record, records, hypervisor, slots, boot_id, now) for record in records.unended())
    )
    adopted = [each for each in found if each is not None]
    keep = {each.record.id for each in adopted}
    for name in await hypervisor.reap(keep):
        log.warning("machine %s of an earlier life of this node was ended", name)
    for name in await slots.reap(keep):
        log.warning("slot %s of an earlier life of this node was released", name)
    return adopted


async def _recover_one(
    record: Sandbox, records: Records, hypervisor: Hypervisor, slots: Slots, boot_id: str, now: float
) -> Adopted | None:
    machine, slot, trouble = await _find(record, hypervisor, slots)
    state = recover(record.state, alive=machine is not None and slot is not None)
    if machine is not None and state not in REACHABLE:
        await _end(machine)
        machine = slot = None
    if state in ENDS:
        reason = _reason(record, state, boot_id, trouble)
        log.warning("sandbox %s: %s", record.id, reason)
        records.update(record.with_state(state, ended_at=now, reason=reason), forget_claim=True)
        return None
    if state is not record.state:
        record = record.with_state(state)
        records.update(record)
    log.info("sandbox %s is adopted, %s", record.id, state)
    return Adopted(record, machine, slot)


async def _find(
    record: Sandbox, hypervisor: Hypervisor, slots: Slots
) -> tuple[Machine | None, Slot | None, str | None]:
    """The machine and slot of a record as far as they are there, and what stood in the way."""
    machine = None
    if record.machine is None:
        return None, None, None
    try:
        machine = await hypervisor.adopt(record.machine)
        slot = await slots.adopt(record.id) if machine is not None else None
    except AenvError as error:  # one that cannot be adopted must not keep the others from it
        return machine, None, f"it could not be adopted: {error}"
    if machine is not None and slot is None:
        return machine, None, "its network slot was gone when the node started again"
    return machine, slot, None


async def _end(machine: Machine) -> None:
    try:
        await machine.end()
    except AenvError as error:  # the reap that follows tries again
        log.warning("machine %s of an earlier life of this node: %s", machine.spec.id, error)


def _reason(record: Sandbox, state: State, boot_id: str, trouble: str | None) -> str:
    if record.state is State.CREATING:
        return "the node ended while the sandbox was created"
    if state is State.KILLED:
        return record.reason or "killed"
    if record.boot_id is not None and record.boot_id != boot_id:
        return "the host was restarted"
    return trouble or "its machine was gone when the node started again"
