"""The TCP ports of a node, taken before anything is served on them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from agentenv.errors import HostFault


@contextmanager
def bound(host: str, port: int, setting: str = "--port, AENV_PORT") -> Iterator[socket.socket]:
    """A bound socket, which does not listen yet.

    Raises:
        HostFault: the address cannot be had.
    """
    with contextlib.ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise HostFault(
                f"cannot listen on {host} port {port}: {error.strerror or error}",
                remedy=f"see who does with `ss -ltnp`, or choose another: {setting}",
            ) from error
        listener.setblocking(False)
        yield listener
