"""When the host runs out of memory: which sandboxes give back what, the idlest first. Decided here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentenv.config import Settings
from agentenv.sandbox.admission import OVERHEAD_MIB

Kind = Literal["page_out", "refresh", "pause"]
"""In the order of what they cost the sandbox: time as it comes back, a moment now, the machine."""

KINDS: tuple[Kind, ...] = ("page_out", "refresh", "pause")

# What is less is not worth it.
LEAST_MIB = 32
AT_ONCE = 4
# Pressure is over when there is as much more than what it began below.
OVER = 1.25


@dataclass(frozen=True)
class Policy:
    """What may be done, and when: while the host has less than `below_mib` MiB available, or everything
    waited for memory during more than `stalled` percent of the last ten seconds (0: not looked at), to
    sandboxes that did nothing for `idle_s` seconds. `most` is the last kind that may be done."""

    most: Literal["off"] | Kind
    below_mib: int
    stalled: float
    idle_s: float

    @classmethod
    def of(cls, settings: Settings) -> Policy:
        """The settings' policy."""
        return cls(
            settings.pressure,
            settings.pressure_below_mib,
            settings.pressure_stalled,
            settings.pressure_idle_s,
        )

    @property
    def kinds(self) -> Sequence[Kind]:
        """What may be done, the mildest first."""
        return () if self.most == "off" else KINDS[: KINDS.index(self.most) + 1]


@dataclass(frozen=True)
class Host:
    """The host's memory now. `stalled` is the percentage of the last ten seconds during which all tasks
    waited for memory; None where the kernel does not tell."""

    available_mib: int
    swap_free_mib: int = 0
    stalled: float | None = None


@dataclass(frozen=True)
class Resident:
    """A sandbox that runs: for how many seconds it did nothing, how many MiB its machine holds that nobody
    shares, and what was done to it since it did something."""

    id: str
    idle_s: float
    own_mib: int
    done: frozenset[Kind] = frozenset()


@dataclass(frozen=True)
class Decision:
    """Whether there is pressure, and what follows, in this order."""

    pressed: bool
    actions: tuple[tuple[Kind, str], ...] = ()


def decide(host: Host, residents: Iterable[Resident], policy: Policy, *, pressed: bool) -> Decision:
    """What is to be done now; `pressed` is whether there was pressure before, which ends later than it
    begins. The mildest that may be done comes first for all that are idle, then the next."""
    if not policy.kinds or not _presses(host, policy, pressed):
        return Decision(False)
    wanted_mib = max(LEAST_MIB, int(policy.below_mib * OVER) - host.available_mib)
    idlest = sorted(
        (each for each in residents if each.idle_s >= policy.idle_s and each.own_mib >= LEAST_MIB),
        key=lambda each: -each.idle_s,
    )
    actions: dict[str, Kind] = {}
    gained_mib, swap_mib = 0, host.swap_free_mib
    for kind in policy.kinds:
        for each in idlest:
            if gained_mib >= wanted_mib or len(actions) == AT_ONCE:
                break
            if each.id in actions or kind in each.done or (kind == "page_out" and each.own_mib > swap_mib):
                continue
            actions[each.id] = kind
            gained_mib += _gain(kind, each)
            swap_mib -= each.own_mib if kind == "page_out" else 0
    return Decision(True, tuple((kind, sandbox_id) for sandbox_id, kind in actions.items()))


def _presses(host: Host, policy: Policy, pressed: bool) -> bool:
    """Whether there is too little memory; what ends pressure is a quarter more, or half of the waiting."""
    stalled = host.stalled or 0.0
    if pressed:
        return host.available_mib < policy.below_mib * OVER or 0 < policy.stalled / 2 < stalled
    return host.available_mib < policy.below_mib or 0 < policy.stalled < stalled


def _gain(kind: Kind, resident: Resident) -> int:
    """MiB that come back: a machine that goes on keeps what is the hypervisor's own."""
    return resident.own_mib if kind != "refresh" else max(0, resident.own_mib - OVERHEAD_MIB)
