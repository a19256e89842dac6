"""Limits on a slot's traffic: the kernel's token buckets at both ends of its namespace.

What the guest sends leaves by the uplink, what it receives by the tap, whoever the other side is, the node
included: there is no way around. A sender that is too fast waits in a short queue, then loses packets, and
slows down.
"""

from __future__ import annotations

import errno
from pathlib import Path

from agentenv.errors import HostFault, HostIncapable
from agentenv.limits import BURST_MOST, NetworkLimits
from agentenv.network import namespace, netlink, nft
from agentenv.network.netlink import Request, Rtnetlink

_BURST_LEAST = 64 * 1024  # the largest packet before it is cut into segments
_QUEUE_LEAST = 128 * 1024


def apply(path: Path, limits: NetworkLimits) -> None:
    """Put limits in force in a slot's namespace, or lift them. Blocks.

    Raises:
        HostIncapable: the kernel has no token buckets. HostFault: it refused, or the slot is gone.
    """
    rates = ((nft.TAP, limits.rx_bytes_per_second), (nft.UPLINK, limits.tx_bytes_per_second))
    try:
        with namespace.inside(path), Rtnetlink() as own:
            for name, rate in rates:
                link = own.link(name)
                if link is None:
                    raise HostFault(f"the link {name} of {path.name} has gone")
                if rate is not None:
                    own.apply(shaped(link.index, rate, limits.burst_bytes))
                else:
                    _lift(own, link.index)
    except OSError as error:
        if error.errno == errno.ENOENT and path.exists():
            raise HostIncapable(
                "the kernel cannot limit traffic: it has no token bucket filter", remedy="modprobe sch_tbf"
            ) from error
        raise HostFault(f"the traffic of {path.name} cannot be limited: {error}") from error


def shaped(index: int, rate: int, burst: int | None) -> Request:
    """The request that limits what an interface sends: a tenth of a second's worth goes at once unless
    another burst is given, and as much may wait."""
    tenth = min(rate // 10, BURST_MOST)
    return netlink.shape(index, rate, burst or max(tenth, _BURST_LEAST), max(tenth, _QUEUE_LEAST))


def _lift(own: Rtnetlink, index: int) -> None:
    try:
        own.apply(netlink.unshape(index))
    except OSError as error:
        if error.errno != errno.ENOENT:  # there were none
            raise
