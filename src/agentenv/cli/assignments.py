"""NAME=VALUE as command lines have it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from agentenv.errors import InvalidRequest


def variables(given: Sequence[str], what: str = "--env") -> dict[str, str]:
    """NAME=VALUE, or NAME alone for what it is here; one that is not set here is left out.

    Raises:
        InvalidRequest: there is no name.
    """
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name:
            raise InvalidRequest(f"{what} {each!r}: there is no name", remedy="NAME=VALUE, or NAME alone")
        if equals:
            found[name] = value
        elif name in os.environ:
            found[name] = os.environ[name]
    return found


def pairs(given: Sequence[str], what: str) -> dict[str, str]:
    """KEY=VALUE.

    Raises:
        InvalidRequest: one is not that.
    """
    found: dict[str, str] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not key or not equals:
            raise InvalidRequest(f"{what} {each!r} is not KEY=VALUE")
        found[key] = value
    return found
