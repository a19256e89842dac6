"""Which name servers of their own sandboxes may have asked: none that they could not be let reach.

The node asks them, from the host's own network, where no rule of a sandbox holds.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, ip_address

from agentenv.errors import InvalidRequest
from agentenv.network.denied import Denied
from agentenv.network.opened import Opened
from agentenv.network.policy import Address, Policy, Range

_PORT = 53


class OwnServers:
    """The servers that the node lets sandboxes name, as its rules let them reach addresses.

    Args:
        denied: what no sandbox reaches,
        opened: but for these,
        block: and the node's own addresses.
    """

    def __init__(self, denied: Denied, opened: Iterable[Opened], block: IPv4Network) -> None:
        self._denied: list[Range] = [*denied.ipv4, *denied.ipv6, block]
        self._opened = set(opened)

    def permitted(self, server: Address) -> bool:
        """Whether a server may be asked for a sandbox, as the host's addresses are now."""
        if isinstance(server, IPv4Address) and Opened(server, _PORT) in self._opened:
            return True
        if server.is_multicast or server.is_unspecified or server.is_loopback or _is_the_hosts(server):
            return False
        return not any(server in each for each in self._denied if each.version == server.version)

    def check(self, policy: Policy) -> None:
        """See that all servers of a policy may be asked.

        Raises:
            InvalidRequest: one may not.
        """
        for server in policy.dns_servers or ():
            if not self.permitted(server):
                raise InvalidRequest(
                    f"network.dnsServers: {server} is in a range that this node denies to sandboxes",
                    remedy="name a public server, or have the operator open its address and port 53",
                )


def _is_the_hosts(server: Address) -> bool:
    """Whether the host would speak to itself: then its end has the same address. Nothing is sent."""
    family = socket.AF_INET if server.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(server), _PORT))
        except OSError:
            return False  # there is no way to it
        return ip_address(probe.getsockname()[0]) == server
