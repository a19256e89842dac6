"""The host that a sandbox's services are told instead of the one that clients ask for (`maskRequestHost`)."""

from __future__ import annotations

import re

from agentenv.errors import InvalidRequest

PORT = "${PORT}"  # stands for the port that is asked for
LONGEST = 253  # of a name (RFC 1035, 2.3.4)

_MASK = re.compile(
    r"(?:(?![.-])(?:[A-Za-z0-9._-]|\$\{PORT\})+(?<!-)|\[[0-9A-Fa-f:.]+\])(?::(?:[0-9]{1,5}|\$\{PORT\}))?"
)


def check(mask: str) -> None:
    """See that it can be a Host field: a name or an address, with a port or without.

    Raises:
        InvalidRequest: it cannot.
    """
    if len(mask) > LONGEST or _MASK.fullmatch(mask) is None:
        raise InvalidRequest(
            f"network.maskRequestHost: {mask[:80]!r} is no host",
            remedy=f"such as localhost:{PORT} or example.com",
        )


def masked(mask: str, port: int) -> bytes:
    """The value of Host for a request to that port."""
    return mask.replace(PORT, str(port)).encode()
