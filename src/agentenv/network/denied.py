"""The ranges that a node denies to all its sandboxes, whatever a sandbox's own rules say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import NamedTuple

from agentenv.errors import InvalidRequest
from agentenv.network.policy import Range


class Denied(NamedTuple):
    """Canonical ranges of both families."""

    ipv4: tuple[IPv4Network, ...] = ()
    ipv6: tuple[IPv6Network, ...] = ()


# Where IPv6 addresses hold IPv4 ones, and how many bits come before those: mapped (RFC 4291, 2.5.5.2),
# compatible (2.5.5.1), NAT64's well-known prefix (RFC 6052, 2.1), 6to4 (RFC 3056, 2).
_EMBEDDING = (
    (IPv6Network("::ffff:0:0/96"), 96),
    (IPv6Network("::/96"), 96),
    (IPv6Network("64:ff9b::/96"), 96),
    (IPv6Network("2002::/16"), 16),
)


def denied(ranges: Iterable[str]) -> Denied:
    """The ranges of the setting, and what of IPv6 leads to the IPv4 ranges among them.

    Raises:
        InvalidRequest: one is no network.
    """
    listed = [_network(text) for text in ranges]
    ipv4 = tuple(each for each in listed if isinstance(each, IPv4Network))
    ipv6 = tuple(each for each in listed if isinstance(each, IPv6Network))
    return Denied(ipv4, (*ipv6, *(spelled for each in ipv4 for spelled in _embedded(each))))


def _network(text: str) -> Range:
    try:
        return ip_network(text)
    except ValueError as error:
        raise InvalidRequest(
            f"denied_ranges: {error}", remedy="give networks such as 10.0.0.0/8 or fc00::/7"
        ) from None


def _embedded(network: IPv4Network) -> Iterator[IPv6Network]:
    for prefix, bits in _EMBEDDING:
        shifted = int(network.network_address) << (128 - bits - 32)
        yield IPv6Network((int(prefix.network_address) | shifted, bits + network.prefixlen))
