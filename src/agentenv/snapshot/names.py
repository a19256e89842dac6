"""Names of snapshots: `name:tag`, or `namespace/name:tag`; the tag is `default` where none is given."""

from __future__ import annotations

import re

from agentenv.errors import InvalidRequest

DEFAULT_TAG = "default"

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_NAME = re.compile(rf"(?P<name>(?:{_PART}/)?{_PART})(?::(?P<tag>{_PART}))?")


def canonical(name: str) -> str:
    """The name with its tag.

    Raises:
        InvalidRequest: it cannot be a name.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise InvalidRequest(
            f"{name!r} cannot be a snapshot's name",
            remedy="NAME, NAME:TAG or NAMESPACE/NAME:TAG of letters, digits, `.`, `_` and `-`, "
            "a letter or digit first in each",
        )
    return f"{found['name']}:{found['tag'] or DEFAULT_TAG}"


def untagged(name: str) -> str:
    """The name without its tag."""
    return name.rpartition(":")[0] if ":" in name else name


def matches(name: str, wanted: str) -> bool:
    """Whether a canonical name is the wanted one; a wanted one without a tag means any tag."""
    return name == wanted or untagged(name) == wanted
