"""What the data plane asks about sandboxes. The sandbox service answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Route:
    """Where a sandbox is reached, for one generation of its machine.

    Connections made for one generation are never used for another: an address is given to the
    next sandbox when its slot is free again.
    """

    sandbox_id: str
    generation: int
    address: str
    access_token: str
    traffic_token: str | None
    public: bool


class Directory(Protocol):
    """Sandboxes by id."""

    def route(self, sandbox_id: str) -> Route | None:
        """The route to a sandbox that runs now, else None. Synchronous: it is asked per request."""

    def by_signature(
        self, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route | None:
        """The running sandbox whose access token made this file signature (e2b's `/files` urls
        built from a plain sandbox url carry no sandbox id)."""
