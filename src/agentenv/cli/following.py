"""What goes on at a node that may be away for a while: events (server-sent) as they come, taken up again
where the connection broke off, and what is asked again and again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from agentenv.cli.api import Answer, Unreachable
from agentenv.cli.server import Node

if TYPE_CHECKING:
    from http.client import HTTPResponse

SILENT_S = 45.0  # the node says something every 15 s
AGAIN_S = 1.0
ENDED = (404, 410)  # what a node answers for a sandbox that was
Query = Mapping[str, Sequence[str]]


def through(node: Node, path: str, *, refused: tuple[int, ...] = ()) -> Answer:
    """The answer of a node that was there, once it is there again; as `Node.ask`."""
    while True:
        try:
            return node.ask("GET", path, refused=refused)
        except Unreachable:
            time.sleep(AGAIN_S)  # there is nothing to wait for until the node is there again


def has_ended(node: Node, sandbox: str) -> bool:
    """Whether a sandbox that there was is no more."""
    return through(node, f"/sandboxes/{sandbox}", refused=ENDED).status in ENDED


def events(
    node: Node, query: Query, *, after: str | None = None, opened: Callable[[], None] = lambda: None
) -> Iterator[dict[str, Any]]:
    """Events of a node, for as long as it is asked for them.

    Args:
        node: the node.
        query: which, as its API has it.
        after: the id of the event before the first one that is wanted; what comes from now on, if None.
        opened: called whenever a connection stands, from which on nothing is missed.

    Raises:
        AenvError: they are refused. Unreachable: the node was never there.
    """
    there = False
    while True:
        given: dict[str, Sequence[str] | str] = {**query, **({"after": after} if after else {})}
        try:
            response = node.open(f"/events?{urlencode(given, doseq=True)}", limit_s=SILENT_S)
        except Unreachable:
            if not there:
                raise
            time.sleep(AGAIN_S)  # there is nothing to wait for until the node is there again
            continue
        there = True
        with response:
            if response.status != 200:
                headers = {name.lower(): value for name, value in response.getheaders()}
                raise Answer(response.status, headers, response.read()).fault("GET /events")
            opened()
            for event in _read(response):
                after = event.get("id", after)
                yield event


def _read(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Events until the connection ends, however it does."""
    from http.client import HTTPException

    data: list[str] = []
    try:
        for line in response:
            name, _, value = line.decode(errors="replace").rstrip("\r\n").partition(":")
            if name == "data":
                data.append(value.removeprefix(" "))
            elif not name and not value and data:
                yield dict(json.loads("\n".join(data)))
                data.clear()
    except (OSError, HTTPException):
        return
