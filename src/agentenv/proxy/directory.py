"""What the data plane asks about sandboxes. The sandbox service answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Asleep = Literal["paused", "wakes", "stalled"]


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
    mask_host: str | None = None  # what its services are told for Host, see `sandbox.masking`


class Guard(NamedTuple):
    """What is asked of those who come to a sandbox: the parts of a route that it has without one as well."""

    access_token: str
    traffic_token: str | None
    public: bool


class Directory(Protocol):
    """Sandboxes by id."""

    def route(self, sandbox_id: str) -> Route | None:
        """The route to a sandbox that runs now, else None. Synchronous: it is asked per request."""

    def by_signature(
        self, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route | str | None:
        """The running sandbox whose access token made this file signature (e2b's `/files` urls
        built from a plain sandbox url carry no sandbox id). The id of one that `wakes` for it, unless the
        signature has expired: what the agent would refuse wakes nobody."""

    def asleep(self, sandbox_id: str) -> Asleep | None:
        """For a sandbox without a route: whether it is paused, whether it would wake for traffic or is
        about to run again, and whether it stands still since its disk cannot be written. None for every
        other one."""

    def guard(self, sandbox_id: str) -> Guard | None:
        """What is asked of those who want to wake a sandbox; None if there is no such sandbox."""

    async def wake(self, sandbox_id: str) -> None:
        """Have a sandbox that `wakes` run again, and return when it does or cannot: then its route tells."""
