"""Which policy is in force at which slot, and what names have opened there."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.network.policy import Policy


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
