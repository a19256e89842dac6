"""How long chains of layers may be, and what takes their place. Decided here; nothing is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentenv.config import Settings
from agentenv.snapshot.records import Fold, Memory

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Above which a chain is folded: layers of memory or of disk, bytes of memory that each start has to
    write in, and sandboxes that do so. `spare_bytes` of the disk stay free in any case."""

    layers: int = 16
    delta_bytes: int = 256 * MIB
    starts: int = 8
    spare_bytes: int = 0

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """The limits that the settings give."""
        return cls(
            settings.fold_layers,
            settings.fold_delta_mib * MIB,
            settings.fold_starts,
            settings.disk_floor_mib * MIB,
        )


def memory_fold(memory: Memory, starts: int, limits: Limits) -> Literal["flat", "delta"] | None:
    """What the layers of a memory are to become, if anything: one flat file, which costs a copy of the base
    and makes starts the cheapest, or one delta above the base, which goes on to be shared.

    `starts` is how many sandboxes that exist now were started from it.
    """
    written = sum(delta.bytes for delta in memory.deltas)
    if written > limits.delta_bytes or (written and starts >= limits.starts):
        return "flat"
    return "delta" if len(memory.deltas) > limits.layers else None


def disk_fold(sizes: Sequence[int], limits: Limits) -> int | None:
    """From which of a disk's layers on, bottom up, they are to become one; None when they need not.

    Layers that hold more than all those above them are left, as long as enough become one: what is
    large and old is not copied each time. `sizes` are the bytes of those that may be folded at all.
    """
    if len(sizes) <= limits.layers:
        return None
    first = 0
    while first < limits.layers // 2 and sizes[first] > sum(sizes[first + 1 :]):
        first += 1
    return first


def folded(chain: Sequence[str], folds: Iterable[Fold]) -> tuple[tuple[str, ...], tuple[Fold, ...]]:
    """A chain of files with what has taken the place of some, and which of the folds that were."""
    names, used = tuple(chain), []
    for fold in folds:
        at, length = _find(names, fold.replaces), len(fold.replaces)
        if at is not None:
            names = (*names[:at], fold.path, *names[at + length :])
            used.append(fold)
    return names, tuple(used)


def _find(chain: Sequence[str], run: Sequence[str]) -> int | None:
    length = len(run)
    return next(
        (at for at in range(len(chain) - length + 1) if tuple(chain[at : at + length]) == tuple(run)), None
    )
