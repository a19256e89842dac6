"""Options that the commands of this room share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from agentenv.cli.assignments import variables
from agentenv.cli.attached.terminal import DETACH_KEYS, parse_keys
from agentenv.cli.meant import node_address
from agentenv.cli.options import node_options
from agentenv.cli.server import Node

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Attaching:
    """How what is started is to be, and where.

    Args:
        user: the account; the sandbox's default one if None.
        cwd: where it begins.
        env: its variables.
        keys: that leave a shell.
        node: finds the node that is meant; it raises what `node_address` does.
    """

    user: str | None
    cwd: str | None
    env: Mapping[str, str]
    keys: bytes
    node: Callable[[], Node]


def attaching_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--user`, `--cwd`, `--env` and `--detach-keys`, and the options of a node, from which the command gets
    an `Attaching` as its first argument."""

    @functools.wraps(function)
    def with_attaching(
        *arguments: Any,
        user: str | None,
        cwd: str | None,
        env: Sequence[str],
        detach_keys: str,
        url: str | None,
        api_key: str | None,
        home: Path | None,
        **more: Any,
    ) -> Any:
        def node() -> Node:
            return Node(*node_address(url, api_key, home))

        asked = Attaching(user, cwd, variables(env), parse_keys(detach_keys), node)
        return function(asked, *arguments, **more)

    return _process_options(_detach_option(node_options(with_attaching)))


def _process_options(function: F) -> F:
    function = click.option(
        "--env",
        "-e",
        "env",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="A variable; without a value, this one's.",
    )(function)
    function = click.option("--cwd", "--workdir", "-w", metavar="DIR", help="Where it is started.")(function)
    return click.option("--user", "-u", metavar="NAME", help="As whom (the sandbox's default user).")(
        function
    )


def _detach_option(function: F) -> F:
    return click.option(
        "--detach-keys",
        envvar="AENV_DETACH_KEYS",
        default=DETACH_KEYS,
        show_default=True,
        metavar="KEYS",
        help="Keys that leave a shell, which goes on; none if empty (AENV_DETACH_KEYS).",
    )(function)
