"""What a request comes to once it may go where it asks to: it lasts as long as the request and the route do.

Clients often send the very same head again on a connection. Each time its sandbox is looked up, and
where that is the same as before, nothing of this is worked out anew.
"""

from __future__ import annotations

from typing import NamedTuple

from agentenv.proxy.directory import Route
from agentenv.proxy.forward import request_to_guest
from agentenv.proxy.head import RequestHead
from agentenv.proxy.routing import AGENT_PORT, Target
from agentenv.proxy.upstream import Key
from agentenv.sandbox.masking import masked

_SAFE = frozenset({b"GET", b"HEAD", b"OPTIONS"})


class Passage(NamedTuple):
    """A request that may go to its sandbox.

    What allows it is in these three alone, unless `fleeting`: then it must be asked for each time.
    """

    head: RequestHead
    target: Target
    route: Route
    fleeting: bool = False


class Order:
    """A request as a guest gets it.

    Args:
        passage: where it goes.
        client: the client's address.
        scheme: `http` or `https`, as the client spoke it.
        has_body: whether a body follows.
    """

    __slots__ = ("key", "passage", "replayable", "request", "upgrade")

    def __init__(self, passage: Passage, client: bytes, scheme: bytes, has_body: bool) -> None:
        head, target, route, _ = passage
        self.passage = passage
        self.key = Key(route.sandbox_id, route.generation, target.port)
        self.upgrade = target.port != AGENT_PORT and head.upgrade is not None
        self.replayable = not has_body and head.method in _SAFE
        self.request = request_to_guest(
            head, target.path, client, scheme, self.upgrade, told_host(route, target.port)
        )


def told_host(route: Route, port: int) -> bytes | None:
    """The host that a service is told, if it is another than was asked for; the agent is told the truth."""
    if route.mask_host is None or port == AGENT_PORT:
        return None
    return masked(route.mask_host, port)
