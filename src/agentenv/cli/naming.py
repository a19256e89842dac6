"""Which object a word of the command line means: an id, the beginning of one, or a name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, urlencode

from agentenv.cli.server import Node
from agentenv.errors import Conflict, NotFound

NAME = "name"  # the metadata in which `aenv start --name` puts a sandbox's name

_WHOLE = re.compile(r"i[a-z2-7]{19}")
_PART = re.compile(r"i[a-z2-7]{0,18}")
_SHOWN = 5


def sandboxes(node: Node, **query: str | None) -> Iterator[dict[str, Any]]:
    """All sandboxes that a query of the API selects, page by page."""
    return node.pages("/v2/sandboxes", query)


def sandbox_of(node: Node, text: str) -> str:
    """The id of the sandbox that is meant.

    Raises:
        NotFound: none is. Conflict: several are.
    """
    if _WHOLE.fullmatch(text):
        return text
    found = [each["sandboxID"] for each in sandboxes(node, metadata=urlencode({NAME: text}))]
    if not found and _PART.fullmatch(text):
        found = _beginning(text, (each["sandboxID"] for each in sandboxes(node)))
    return _only(text, found, "sandbox", "aenv list")


def snapshot_of(node: Node, text: str) -> str:
    """The id of the snapshot that is meant.

    Raises:
        NotFound: none is. Conflict: several are.
    """
    answer = node.ask("GET", f"/snapshots/{quote(text, safe='')}", refused=(404,))
    if answer.status != 404:
        return str(answer.json()["snapshotID"])
    found = _beginning(text, (each["snapshotID"] for each in node.pages("/snapshots", {})))
    return _only(text, found, "snapshot", "aenv snapshot list")


def template_of(node: Node, text: str) -> str:
    """The name or id of the template that is meant.

    Raises:
        NotFound: none is. Conflict: several are.
    """
    answer = node.ask("GET", f"/templates/aliases/{quote(text, safe='/:')}", refused=(404,))
    if answer.status != 404:
        return str(answer.json()["templateID"])
    found = _beginning(text, (each["templateID"] for each in node.call("GET", "/templates")))
    return _only(text, found, "template", "aenv template list")


def _beginning(text: str, ids: Iterable[str]) -> list[str]:
    return [each for each in ids if text and each.startswith(text)]


def _only(text: str, found: list[str], what: str, remedy: str) -> str:
    if not found:
        raise NotFound(f'there is no {what} "{text}"', remedy=f"`{remedy}` shows them")
    if len(found) > 1:
        shown = ", ".join(found[:_SHOWN]) + (", …" if len(found) > _SHOWN else "")
        raise Conflict(f'"{text}" can be any of {len(found)}: {shown}', remedy="give the id, or more of it")
    return found[0]
