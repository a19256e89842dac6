"""Who may ask a resolver, in tests without slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentenv.network.applied import Asker
from agentenv.network.policy import UNRESTRICTED, Address, Policy


class Gate:
    """Everyone is one sandbox with a policy. `opened` is what was opened, in order; `opens` says whether it
    can be, and is called while that is asked."""

    def __init__(self, policy: Policy = UNRESTRICTED) -> None:
        self.policy: Policy | None = policy
        self.opened: list[tuple[str, dict[str, float]]] = []
        self.opens: Callable[[], bool] = lambda: True
        self.denied: set[str] = set()

    def asker_at(self, address: str) -> Asker | None:
        return None if self.policy is None else Asker("sandbox", 1, 1, self.policy, 0)

    def may_serve(self, server: Address) -> bool:
        return str(server) not in self.denied

    async def open(self, asker: Asker, name: str, found: Sequence[tuple[Address, float]]) -> bool:
        if asker.policy != self.policy or not self.opens():
            return False
        self.opened.append((name, {str(address): seconds for address, seconds in found}))
        return True
