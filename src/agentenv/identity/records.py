"""API keys as values: what one may, how much, and for which project."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, fields
from typing import Literal

from agentenv.errors import InvalidRequest
from agentenv.records.document import Documents

# The project of the node's first key, whose names of templates and snapshots have no namespace.
DEFAULT = "default"

Scope = Literal["admin", "use"]

_PROJECT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,100}")
_KEY_BYTES = 20  # 160 bits
_SHOWN = 8  # letters of a key that are kept to know it by


@dataclass(frozen=True)
class Quota:
    """What the sandboxes made with a key may take together; None is no limit. Processors and memory (MiB)
    are of those that run, disk (MiB) as of admission: what all may write."""

    sandboxes: int | None = None
    vcpus: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) is not None for each in fields(self))


UNLIMITED = Quota()


@dataclass(frozen=True)
class Rate:
    """Requests that a key may make: per second in the long run, and at once after a rest."""

    per_second: float
    burst: int


@dataclass(frozen=True)
class Key:
    """An API key. `digest` is the SHA-256 of what clients send: for 160 random bits, no slower hash is
    needed. `shown` are its first letters. Times are seconds since the epoch."""

    id: str
    name: str
    project: str
    scopes: tuple[Scope, ...]
    digest: str
    shown: str
    created_at: float
    quota: Quota = UNLIMITED
    rate: Rate | None = None
    revoked_at: float | None = None

    @property
    def is_admin(self) -> bool:
        return "admin" in self.scopes


KEYS = Documents(Key, "an API key")


def new_secret() -> str:
    """What a client sends: `e2b_` and hexadecimal digits, which older E2B clients insist on."""
    return f"e2b_{secrets.token_hex(_KEY_BYTES)}"


def digest_of(secret: str | bytes) -> str:
    """By which a key is found."""
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).hexdigest()


def shown_of(secret: str) -> str:
    """What of a key may be seen."""
    return secret[:_SHOWN]


def check_project(project: str) -> str:
    """A project's name, if it can be one: it is the namespace of the names in it.

    Raises:
        InvalidRequest: it cannot.
    """
    if not _PROJECT.fullmatch(project):
        raise InvalidRequest(
            f"{project!r} cannot be a project's name",
            remedy="up to 63 lowercase letters, digits, - and _, a letter or digit first",
        )
    return project


def check_key_name(name: str) -> str:
    """A key's name, if it can be one.

    Raises:
        InvalidRequest: it is empty, too long or has control characters.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest("a key's name has 1 to 100 characters, none of them for control")
    return name
