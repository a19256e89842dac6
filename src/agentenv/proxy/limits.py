"""How long the data plane waits, and how much it takes, as the settings say (docs/reference/proxy.md)."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from agentenv.config import Settings
from agentenv.errors import CapacityExceeded

# Of the files that may be open: a request to a guest takes one more, and the rest is for all else.
_SHARE = 3


class TooManyConnections(CapacityExceeded):
    """A client has as many connections as one may have, or all have together."""

    status = 429
    code = "too_many_connections"


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds, bytes and numbers; of those that say so 0 is no limit.

    Args:
        head_bytes: of a head, of requests and of answers.
        head_s: from a head's first byte to its last.
        idle_s: between requests of a client's connection.
        connect_s: for a connection to a guest.
        answer_s: from a request's end to the head of its answer; 0.
        still_s: without a byte either way in the midst of a body or a tunnel; 0.
        wake_s: for a sandbox to wake; 0.
        connections: of all clients.
        per_client: connections of one address; 0.
        per_sandbox: requests and tunnels under way to one sandbox; 0.
    """

    head_bytes: int
    head_s: float
    idle_s: float
    connect_s: float
    answer_s: float
    still_s: float
    wake_s: float
    connections: int
    per_client: int
    per_sandbox: int

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """Those of a node."""
        return cls(
            settings.proxy_head_bytes,
            settings.proxy_head_s,
            settings.proxy_idle_s,
            settings.proxy_connect_s,
            settings.proxy_answer_s,
            settings.proxy_still_s,
            settings.proxy_wake_s,
            settings.proxy_connections or resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE,
            settings.proxy_per_client,
            settings.proxy_per_sandbox,
        )
