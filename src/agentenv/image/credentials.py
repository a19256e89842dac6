"""Who asks a registry: credentials given with a request, which live in memory only."""

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


@dataclass(frozen=True)
class AwsKeys:
    """What is exchanged for credentials of a registry of Amazon's, see registry.ecr; kept as those are."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    region: str
