"""What a shell offers in the place of a sandbox, a snapshot, a template or a server: what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click
from click.types import StringParamType

from agentenv.errors import AenvError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from agentenv.cli.server import Node

LIMIT_S = 1.0  # somebody waits with a finger on the key
MOST = 100

Found = Iterable[tuple[str, str]]  # a word, and what it is


class Named(StringParamType):
    """Text that names one of what there is; `words` asks for them when a shell completes it."""

    def __init__(self, words: Callable[[click.Context], Found]) -> None:
        self._words = words

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Those that begin so; none when they cannot be had."""
        from click.shell_completion import CompletionItem

        try:
            found = [each for each in self._words(ctx) if each[0].startswith(incomplete)]
        except AenvError:  # no place for it: the shell shows the line that is being typed
            return []
        return [CompletionItem(word, help=what) for word, what in found]


def _sandboxes(ctx: click.Context) -> Iterator[tuple[str, str]]:
    for each in _ask(ctx, f"/v2/sandboxes?limit={MOST}"):
        about = f"{each.get('alias') or each['templateID']}, {each['state']}"
        if name := (each.get("metadata") or {}).get("name"):
            yield name, about
        yield each["sandboxID"], about


def _snapshots(ctx: click.Context) -> Iterator[tuple[str, str]]:
    for each in _ask(ctx, f"/snapshots?limit={MOST}"):
        for name in each["names"]:
            yield name, "snapshot"
        yield each["snapshotID"], " ".join(each["names"])


def _templates(ctx: click.Context) -> Iterator[tuple[str, str]]:
    for each in _ask(ctx, "/templates"):
        for name in each["names"]:
            yield name, each["buildStatus"]


def _profiles(ctx: click.Context) -> Iterator[tuple[str, str]]:
    from agentenv.cli import profiles

    for name, each in profiles.load().known.items():
        yield name, each.url


def _ask(ctx: click.Context, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _node(ctx).call("GET", path, limit_s=LIMIT_S)
    return found


def _node(ctx: click.Context) -> Node:
    from agentenv.cli.meant import node_address
    from agentenv.cli.server import Node

    with ctx.scope(cleanup=False):
        given = ctx.params
        return Node(*node_address(given.get("url"), given.get("api_key"), given.get("home")))


SANDBOX = Named(_sandboxes)
SNAPSHOT = Named(_snapshots)
TEMPLATE = Named(_templates)
PROFILE = Named(_profiles)
