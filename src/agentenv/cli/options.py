"""Options that several commands share, and the settings made from them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from agentenv.errors import InvalidRequest

if TYPE_CHECKING:
    from agentenv.image.credentials import Credentials

F = TypeVar("F", bound=Callable[..., Any])


def home_option(function: F) -> F:
    """`--home DIR`, over AENV_HOME."""
    return click.option(
        "--home",
        type=click.Path(file_okay=False, path_type=Path),
        help="Data directory (AENV_HOME; /var/lib/aenv for root, ~/.local/share/aenv for a user).",
    )(function)


def address_options(function: F) -> F:
    """`--host` and `--port` of the API."""
    function = click.option("--port", type=click.IntRange(0, 65535), help="TCP port (8000; 0: a free one).")(
        function
    )
    return click.option("--host", help="Address to listen on (127.0.0.1).")(function)


def credential_options(function: F) -> F:
    """`--username NAME` and `--password-stdin`, for a registry; see `credentials`."""
    function = click.option(
        "--password-stdin", is_flag=True, help="Read the password from standard input; it is not kept."
    )(function)
    return click.option("--username", metavar="NAME", help="User name at the registry, this time only.")(
        function
    )


def credentials(username: str | None, password_stdin: bool) -> Credentials | None:
    """What the two options give.

    Raises:
        InvalidRequest: one is there without the other.
    """
    from agentenv.image.credentials import Credentials

    if not username and not password_stdin:
        return None
    if not username or not password_stdin:
        raise InvalidRequest("--username and --password-stdin go together")
    return Credentials(username, sys.stdin.readline().rstrip("\r\n"))


def init_option(function: F) -> F:
    """`--init agent|systemd`."""
    return click.option(
        "--init",
        type=click.Choice(["agent", "systemd"]),
        help="What is process 1 of its sandboxes (as the image says: systemd if that is its entry point).",
    )(function)


def output_option(function: F) -> F:
    """`--output table|json`."""
    return click.option(
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="Form of the answer.",
    )(function)
