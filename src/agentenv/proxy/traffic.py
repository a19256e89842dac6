"""What has gone through the data plane, counted: an addition for each request and each piece of its bytes."""

from __future__ import annotations


class Traffic:
    """Numbers since the node began: connections of clients, requests to sandboxes (tunnels among them), and
    the bytes of their bodies and answers."""

    __slots__ = ("connections", "from_guests", "requests", "to_guests")

    def __init__(self) -> None:
        self.connections = 0
        self.requests = 0
        self.to_guests = 0
        self.from_guests = 0
