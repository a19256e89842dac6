"""How much is held ready, decided from demand: one pure function, nothing is done here.

What is wanted of a kind is the most of it that was asked for within any few seconds, over the last few
minutes: a pool refills between bursts, so it need hold no more than one burst, and when demand has ended
it is forgotten after that time and the pool shrinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentenv.sandbox.admission import Need


@dataclass(frozen=True)
class Bounds:
    """Between what sizes move. `window_s` is how long a burst lasts, `keep_s` how long it is remembered."""

    least: int
    most: int
    total: int
    slots_least: int
    slots_most: int
    window_s: float = 5.0
    keep_s: float = 300.0


@dataclass(frozen=True)
class Shelf:
    """The machines of one snapshot: `ready` ones, `making` under way, and when one was `asked` for
    (seconds, oldest first). Nothing is made while `held_back`: its last attempts failed."""

    snapshot_id: str
    need: Need
    ready: int
    making: int
    asked: Sequence[float]
    held_back: bool = False


@dataclass(frozen=True)
class SlotShelf:
    """The same of network slots; `free` more can be made."""

    ready: int
    making: int
    asked: Sequence[float]
    free: int


@dataclass(frozen=True)
class Plan:
    """What to do: machines to make and ready ones to drop by snapshot id, the most urgent first, and
    slots to make or drop."""

    make: dict[str, int] = field(default_factory=dict)
    drop: dict[str, int] = field(default_factory=dict)
    make_slots: int = 0
    drop_slots: int = 0


def plan(now: float, shelves: Iterable[Shelf], slots: SlotShelf, room: Need, bounds: Bounds) -> Plan:
    """What is to be made and dropped.

    Args:
        now: on the clock that tells when things were asked for.
        shelves: of machines, one per snapshot.
        slots: the network's shelf.
        bounds: between which sizes follow demand.
        room: what admission has left beyond what pools hold; negative where they have to give back.
    """
    shelves = list(shelves)
    goals = _goals(now, shelves, room, bounds)
    drop = {}
    for shelf in shelves:
        surplus = shelf.ready + shelf.making - goals[shelf.snapshot_id]
        if surplus > 0 and shelf.ready:
            drop[shelf.snapshot_id] = min(shelf.ready, surplus)
            room += _times(shelf.need, drop[shelf.snapshot_id])
    make: dict[str, int] = {}
    for shelf in sorted(shelves, key=_recency, reverse=True):
        lack = 0 if shelf.held_back else goals[shelf.snapshot_id] - shelf.ready - shelf.making
        # What is under way and wanted no more keeps its room until it is finished.
        while lack > make.get(shelf.snapshot_id, 0) and not room.short_of(shelf.need):
            make[shelf.snapshot_id] = make.get(shelf.snapshot_id, 0) + 1
            room -= shelf.need
    lack = _slots_wanted(now, slots, bounds) - slots.ready - slots.making
    return Plan(make, drop, max(0, min(lack, slots.free)), max(0, min(slots.ready, -lack)))


def _goals(now: float, shelves: list[Shelf], room: Need, bounds: Bounds) -> dict[str, int]:
    """How many machines of each there should be, handed out in rounds: nobody gets a second before
    everybody has a first, and those asked for last come first."""
    goals = {shelf.snapshot_id: 0 for shelf in shelves}
    wanted = {shelf.snapshot_id: _wanted(now, shelf, bounds) for shelf in shelves}
    left, machines = room, bounds.total
    for shelf in shelves:
        left += _times(shelf.need, shelf.ready + shelf.making)
    order = sorted(shelves, key=_recency, reverse=True)
    for number in range(bounds.most):
        for shelf in order:
            if wanted[shelf.snapshot_id] > number and machines > 0 and not left.short_of(shelf.need):
                goals[shelf.snapshot_id] += 1
                left -= shelf.need
                machines -= 1
    return goals


def _wanted(now: float, shelf: Shelf, bounds: Bounds) -> int:
    peak = peak_demand(shelf.asked, now, bounds)
    return min(bounds.most, max(bounds.least, peak)) if peak else 0


def _slots_wanted(now: float, slots: SlotShelf, bounds: Bounds) -> int:
    return min(bounds.slots_most, max(bounds.slots_least, peak_demand(slots.asked, now, bounds)))


def peak_demand(asked: Sequence[float], now: float, bounds: Bounds) -> int:
    """The most that was asked for within any `window_s` of the last `keep_s` seconds."""
    recent = [time for time in asked if now - bounds.keep_s < time <= now]
    peak = first = 0
    for last, time in enumerate(recent):
        while time - recent[first] > bounds.window_s:
            first += 1
        peak = max(peak, last - first + 1)
    return peak


def _recency(shelf: Shelf) -> tuple[float, str]:
    return (shelf.asked[-1] if shelf.asked else float("-inf"), shelf.snapshot_id)


def _times(need: Need, count: int) -> Need:
    return sum([need] * count, Need())
