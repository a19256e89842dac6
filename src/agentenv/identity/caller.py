"""Who makes the request that is being answered."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from agentenv.identity.records import DEFAULT, UNLIMITED, Key, Quota


@dataclass(frozen=True)
class Caller:
    """A key as far as those who answer need it. `project` is the one that is acted for, which an admin
    may choose."""

    key_id: str
    name: str
    project: str = DEFAULT
    is_admin: bool = False
    quota: Quota = UNLIMITED

    @classmethod
    def of(cls, key: Key, project: str | None = None) -> Caller:
        """The caller with that key, acting for `project` or for the key's own."""
        return cls(key.id, key.name, project or key.project, key.is_admin, key.quota)


# Work that nobody asked for, such as at a start.
NODE = Caller("", "node", is_admin=True)

CALLER: ContextVar[Caller] = ContextVar("caller", default=NODE)
