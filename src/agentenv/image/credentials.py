"""Who asks a registry: credentials given with a request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Credentials:
    """For one request to one registry: a user's name and password, or a bearer token.

    They live in memory only: they are in no record, no log, no command line, and not in `repr`.
    """

    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
