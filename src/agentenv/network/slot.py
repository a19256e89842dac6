"""What a network slot is, and the addresses that every guest sees alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# The same in every guest, so that a clone needs no change.
GUEST_ADDRESS = "169.254.0.21"
GUEST_PREFIX = 30
GATEWAY_ADDRESS = "169.254.0.22"  # also the guest's name server
# Of IPv6 where the node has it: a prefix of our own (RFC 4193, drawn at random), the same link as above.
GUEST_ADDRESS6 = "fd5e:c37b:91aa::15"
GATEWAY_ADDRESS6 = "fd5e:c37b:91aa::16"
GUEST_PREFIX6 = 126
GUEST_MAC = "02:fc:00:00:00:05"
# Fixed as well: a guest restored from a snapshot still knows its gateway by this one.
GATEWAY_MAC = "02:fc:00:00:00:06"


@dataclass(frozen=True)
class Slot:
    """A namespace with a tap for one machine, and the address at which the host reaches its guest.

    `lease` tells two successive uses of one index apart: a slot that was given back and taken
    again has another lease.
    """

    index: int
    name: str
    namespace: Path
    tap: str
    mac: str
    address: str
    uid: int
    lease: int = 0
