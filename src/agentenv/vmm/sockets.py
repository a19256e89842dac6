"""Unix sockets by paths of any length, non-blocking.

A socket address has room for 107 bytes of path, a run-time directory may be deeper. Then the
directory is opened and the address goes through `/proc/self/fd`, which is always short.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOM = 107


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, reachable by its owner only.

    Raises:
        OSError: the path is taken or its directory cannot be written.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with _short(path) as address:
            server.bind(address)
        path.chmod(0o600)
        server.listen(4)
    except BaseException:
        server.close()
        raise
    return server


def connect(path: Path) -> socket.socket:
    """A connection to the socket at `path`; Unix sockets connect at once or fail.

    Raises:
        OSError: nobody listens there, or the queue of connections is full.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with _short(path) as address:
            client.connect(address)
    except BaseException:
        client.close()
        raise
    return client


@contextmanager
def _short(path: Path) -> Iterator[str]:
    if len(os.fsencode(path)) <= _ROOM:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
