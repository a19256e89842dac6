"""Which policy is in force at which slot, and what names have opened there: what the kernel has, as values.

The kernel does what is to be done; this is for the decisions before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agentenv.network.egress import LASTING_S, SLOT_TABLE, Opening
from agentenv.network.nfnetlink import Element, Sets
from agentenv.network.policy import UNRESTRICTED, Address, Policy

OPENINGS_MAX = 16_384  # of a slot


@dataclass(frozen=True)
class Asker:
    """Who asks the resolver: the owner of a slot, and the policy in force there when it asked.

    `serial` tells one policy at a slot from the next, whatever they say.
    """

    owner: str
    number: int
    lease: int
    policy: Policy
    serial: int


class Applied:
    """The policy in force at one slot. `lock` is held while what the kernel has there is changed; `sets` are
    those of the slot, once something was opened, and keep its namespace until they are closed."""

    def __init__(self) -> None:
        self.sets: Sets | None = None
        self.policy = UNRESTRICTED
        self.certain = True  # not after a change that failed: it may have been made all the same
        self.serial = 0
        self.lock = asyncio.Lock()
        self._until: dict[Address, dict[str, tuple[float, float]]] = {}
        self._count = 0

    def add(self, elements: Iterable[Element]) -> None:
        """Add to the slot's sets, in a thread that is in its namespace.

        Raises:
            OSError: the kernel refused it.
        """
        self.sets = self.sets or Sets(SLOT_TABLE)
        self.sets.add(elements)

    def close(self) -> None:
        """Let go of the slot's namespace."""
        sets, self.sets = self.sets, None
        if sets is not None:
            sets.close()

    def become(self, policy: Policy, now: float) -> None:
        """Another policy is in force, with what its names have opened before."""
        self.policy = policy
        self.serial += 1
        self._keep(policy.name_matches, now)

    def note(self, openings: Iterable[Opening], now: float) -> None:
        """Names have opened more."""
        for each in openings:
            names = self._until.setdefault(each.address, {})
            self._count += each.name not in names
            names[each.name] = (now + each.new_s, now + each.lasting_s)

    def left(self, policy: Policy, now: float) -> list[Opening]:
        """What names have opened that a policy still leaves open, each address once."""
        found = []
        for address, names in self._until.items():
            left = {
                name: until for name, until in names.items() if until[1] > now and policy.name_matches(name)
            }
            if left:
                new, lasting = (max(times) for times in zip(*left.values(), strict=True))
                found.append(Opening(address, next(iter(left)), max(0.0, new - now), lasting - now))
        return found

    def wider(self, name: str, found: Sequence[tuple[Address, float]], now: float) -> list[Opening] | None:
        """What is to be opened for an answer, None where there is no room for it. An address that is open
        for longer, by an earlier answer or another name, stays so."""
        if self._count + len(found) > OPENINGS_MAX:
            self._keep(lambda _: True, now)
            if self._count + len(found) > OPENINGS_MAX:
                return None
        return [
            Opening(address, name, max(seconds, self._open_until(address) - now), LASTING_S)
            for address, seconds in found
        ]

    def _open_until(self, address: Address) -> float:
        return max((new for new, _ in self._until.get(address, {}).values()), default=0.0)

    def _keep(self, wanted: Callable[[str], bool], now: float) -> None:
        """Forget names that are not wanted, and what is past."""
        kept = {
            address: {name: until for name, until in names.items() if until[1] > now and wanted(name)}
            for address, names in self._until.items()
        }
        self._until = {address: names for address, names in kept.items() if names}
        self._count = sum(map(len, self._until.values()))
