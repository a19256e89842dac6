"""What a starting node makes of the records of its earlier life: adopt, or end and reap."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from agentenv.errors import AenvError
from agentenv.network.slot import Slot
from agentenv.sandbox.core import OWN_KINDS
from agentenv.sandbox.parts import Slots
from agentenv.sandbox.records import Records, Sandbox
from agentenv.sandbox.transitions import ENDS, REACHABLE, State, recover
from agentenv.snapshot.store import Snapshots
from agentenv.vmm.machine import Hypervisor, Machine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adopted:
    """A sandbox that goes on, with its machine and slot unless it is paused."""

    record: Sandbox
    machine: Machine | None
    slot: Slot | None


async def recover_all(
    records: Records,
    hypervisor: Hypervisor,
    slots: Slots,
    snapshots: Snapshots,
    *,
    boot_id: str,
    now: float,
) -> list[Adopted]:
    """Adopt what still runs, give every other record its end, and reap what is left over."""
    found = await asyncio.gather(
        *(
            _recover_one(_finished(record, snapshots, now), records, hypervisor, slots, boot_id, now)
            for record in records.unended()
        )
    )
    adopted = [each for each in found if each is not None]
    keep = {each.record.id for each in adopted if each.machine is not None}
    for name in await hypervisor.reap({each.machine.spec.id for each in adopted if each.machine is not None}):
        log.warning("machine %s of an earlier life of this node was ended", name)
    for name in await slots.reap(keep):
        log.warning("slot %s of an earlier life of this node was released", name)
    return adopted


def _finished(record: Sandbox, snapshots: Snapshots, now: float) -> Sandbox:
    """A pause whose snapshot is on record has happened, though nobody could say so any more. So has another
    capture: what its machine holds by now builds upon it."""
    taken = None if record.target is None else snapshots.recorded(record.target)
    if taken is None:
        return record
    if record.state is not State.PAUSING:
        newest = record.snapshot if taken.memory is None else taken.id
        return record.with_state(record.state, snapshot=newest, target=None)
    if taken.deleted_at is not None:
        return record
    return record.with_state(
        State.PAUSED,
        snapshot=taken.id,
        target=None,
        pause_mode="filesystem" if taken.memory is None else "full",
        paused_until=record.kept_until(now),
        end_at=now,
    )


def drop_orphans(snapshots: Snapshots, adopted: Sequence[Sandbox]) -> None:
    """Delete what sandboxes were paused into or forked from and are not needed for that any more. Whoever
    still runs from one holds it."""
    needed = {record.snapshot for record in adopted if record.state is State.PAUSED}
    for record in snapshots.of_kinds(OWN_KINDS):
        if record.id not in needed:
            snapshots.delete(record.id)


async def _recover_one(
    record: Sandbox, records: Records, hypervisor: Hypervisor, slots: Slots, boot_id: str, now: float
) -> Adopted | None:
    if record.state in (State.PAUSED, State.RESUMING):
        # What of a machine there is, was on its way here or from here: the reap ends it.
        return _paused(record, records, now)
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
        record = record.with_state(state, target=None)
        records.update(record)
    log.info("sandbox %s is adopted, %s", record.id, state)
    return Adopted(record, machine, slot)


def _paused(record: Sandbox, records: Records, now: float) -> Adopted:
    record = record.with_state(
        recover(record.state, alive=False),
        pause_mode=record.pause_mode or "full",
        paused_until=record.paused_until or record.kept_until(now),
        slot=None,
        machine=None,
    )
    records.update(record)
    return Adopted(record, None, None)


async def _find(
    record: Sandbox, hypervisor: Hypervisor, slots: Slots
) -> tuple[Machine | None, Slot | None, str | None]:
    """The machine and slot of a record as far as they are there, and what stood in the way."""
    machine = None
    if record.machine is None:
        return None, None, None
    try:
        machine = await hypervisor.adopt(record.machine)
        slot = await slots.adopt(record.id, record.network.policy) if machine is not None else None
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
