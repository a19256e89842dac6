"""A client's connection that becomes one to a port of a guest: after a 101 every byte is passed, both ways.

An end of either side is passed on by itself, so the other direction goes on; a reader that is slow slows
the writer down. Nothing that speaks HTTP is behind it, so its connection is always a new one.
"""

from __future__ import annotations

from agentenv.proxy import answers
from agentenv.proxy.answers import Payload
from agentenv.proxy.relay import Relay
from agentenv.proxy.routing import FORWARD_PROTOCOL
from agentenv.proxy.upstream import Upstream

_SWITCHING = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %b\r\n\r\n" % FORWARD_PROTOCOL
)


class Forwarded(Relay):
    """See the module. Like the tunnel that a guest's own 101 makes of a relay, but for its beginning."""

    def start(self) -> None:
        """Connect to the port; nothing is sent to it but what the client sends."""
        self._relays.enter(self)
        self._dial()

    def _gone(self) -> Payload:
        return answers.not_running(self._key.sandbox_id, paused=False)

    def _open(self, upstream: Upstream) -> None:
        self._send(_SWITCHING)
        self._begin_tunnel()
