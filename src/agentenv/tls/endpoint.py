"""The port on which the node speaks TLS."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from agentenv.tls.serving import Served

HANDSHAKE_S = 15.0  # that a client has before its first request
GOODBYE_S = 3.0  # that a client has to agree to the end of a connection
WATCH_S = 10.0  # how often it is looked whether there is another certificate


@dataclass(frozen=True)
class Endpoint:
    """A bound socket and the certificate in force."""

    listener: socket.socket
    served: Served

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self.listener.getsockname()[1])

    async def listen(self, protocol: Callable[[], asyncio.Protocol], backlog: int) -> asyncio.Server:
        """Take connections, each with a protocol of its own above TLS."""
        return await asyncio.get_running_loop().create_server(
            protocol,
            sock=self.listener,
            ssl=self.served.context,
            ssl_handshake_timeout=HANDSHAKE_S,
            ssl_shutdown_timeout=GOODBYE_S,
            backlog=backlog,
        )

    async def watch(self) -> None:
        """Have a new certificate served soon after it is there; for good."""
        while True:
            await asyncio.sleep(WATCH_S)  # nothing tells: files behind links, a date
            self.served.refresh()
