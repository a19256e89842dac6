"""What systemd is told by a node that is a service of its (sd_notify(3)); nothing where it is none."""

from __future__ import annotations

import os
import socket


def notify(*states: str) -> None:
    """Tell it these states, such as `READY=1`. Nobody waits for an answer, and a node goes on without."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # an abstract name
        address = f"\0{address[1:]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.connect(address)
            channel.sendall("\n".join(states).encode())
        except OSError:
            pass  # whoever started us is gone
