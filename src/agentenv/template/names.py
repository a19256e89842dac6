"""Names of templates: `NAME` or `NAMESPACE/NAME`, and which build of it, `NAME:TAG`.

Without a tag it is `default`. As E2B's own server does, capitals are taken for small letters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from agentenv.errors import InvalidRequest

DEFAULT_TAG = "default"

_PART = r"[a-z0-9][a-z0-9_-]{0,127}"
_NAME = re.compile(rf"(?:{_PART}/)?{_PART}")
_TAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Reference:
    """A template's name or id, and a tag where one was given."""

    name: str
    tag: str | None = None

    @property
    def tag_or_default(self) -> str:
        """The tag that it means."""
        return self.tag or DEFAULT_TAG


def parse(text: str) -> Reference:
    """A reference as it is written.

    Raises:
        InvalidRequest: it cannot be one.
    """
    name, colon, tag = text.strip().lower().partition(":")
    return Reference(check_name(name), check_tag(tag) if colon else None)


def check_name(name: str) -> str:
    """The name, if it can be one.

    Raises:
        InvalidRequest: other characters than lowercase letters, digits, `-` and `_`, or too long.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} cannot be a template's name",
            remedy="up to 128 lowercase letters, digits, - and _, a letter or digit first;"
            " before it a namespace of the same form and a slash, if you like",
        )
    return name


def check_tag(tag: str) -> str:
    """The tag, if it can be one.

    Raises:
        InvalidRequest: other characters than lowercase letters, digits, `-`, `_` and `.`, or too long.
    """
    if not _TAG.fullmatch(tag):
        raise InvalidRequest(
            f"{tag!r} cannot be a template's tag",
            remedy="up to 128 lowercase letters, digits, -, _ and ., a letter or digit first",
        )
    return tag


def check_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Tags as they are written, each once, in their order.

    Raises:
        InvalidRequest: one cannot be one.
    """
    return tuple(dict.fromkeys(check_tag(tag.strip().lower()) for tag in tags))


def wanted_tags(reference: Reference, more: Iterable[str]) -> tuple[str, ...]:
    """The tags that a build gets which was asked for by that name, with more tags beside it."""
    named = [reference.tag] if reference.tag else []
    return check_tags([*named, *more]) or (DEFAULT_TAG,)
