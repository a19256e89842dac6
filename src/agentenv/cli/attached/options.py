"""Options that the commands of this room share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from agentenv.cli.attached.terminal import DETACH_KEYS
from agentenv.errors import InvalidRequest

F = TypeVar("F", bound=Callable[..., Any])


def process_options(function: F) -> F:
    """`--user`, `--cwd` and `--env` of what is started."""
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


def detach_option(function: F) -> F:
    """`--detach-keys`."""
    return click.option(
        "--detach-keys",
        envvar="AENV_DETACH_KEYS",
        default=DETACH_KEYS,
        show_default=True,
        metavar="KEYS",
        help="Keys that leave a shell, which goes on; none if empty (AENV_DETACH_KEYS).",
    )(function)


def variables(given: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, or NAME alone for what it is here; one that is not set here is left out.

    Raises:
        InvalidRequest: there is no name.
    """
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name:
            raise InvalidRequest(f"{each!r} is no variable", remedy="NAME=VALUE, or NAME alone")
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
