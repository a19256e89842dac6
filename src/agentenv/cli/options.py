"""Options that several commands share, and the settings made from them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from agentenv.cli import profiles
from agentenv.cli.meant import node_address
from agentenv.errors import InvalidRequest

if TYPE_CHECKING:
    from agentenv.image.credentials import Credentials

PASSWORD_VARIABLE = "AENV_REGISTRY_PASSWORD"

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


def quiet_option(function: F) -> F:
    """`--quiet`."""
    return click.option("--quiet", "-q", is_flag=True, help="No progress.")(function)


def credential_options(function: F) -> F:
    """`--username NAME` and `--password-stdin`, for a registry; see `credentials`."""
    function = click.option(
        "--password-stdin", is_flag=True, help="Read the password from standard input; it is not kept."
    )(function)
    return click.option(
        "--username",
        "--registry-user",
        "username",
        metavar="NAME",
        help=f"User name at the registry, this time only; the password may be in {PASSWORD_VARIABLE}.",
    )(function)


def node_options(function: F) -> F:
    """`--url`, `--api-key`, `--profile` and `--home` of the node that is asked; see `meant.node_address`."""
    function = home_option(function)
    function = click.option(
        "--profile",
        envvar=profiles.VARIABLE,
        expose_value=False,
        callback=_remember_profile,
        help="A server that `aenv auth` knows (AENV_PROFILE, or the one in use).",
    )(function)
    function = click.option(
        "--api-key", envvar="E2B_API_KEY", help="Its key (E2B_API_KEY, the profile's, or the local one's)."
    )(function)
    return click.option(
        "--url", envvar="E2B_API_URL", help="The node (E2B_API_URL, or as the profile says)."
    )(function)


def node_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same options, of which the command gets the `Node` that they mean as its first argument."""

    @functools.wraps(function)
    def with_node(
        *arguments: Any, url: str | None, api_key: str | None, home: Path | None, **more: Any
    ) -> Any:
        from agentenv.cli.server import Node

        return function(Node(*node_address(url, api_key, home)), *arguments, **more)

    return node_options(with_node)


def _remember_profile(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    context.meta[profiles.VARIABLE] = value


def credentials(username: str | None, password_stdin: bool) -> Credentials | None:
    """What the two options give.

    Raises:
        InvalidRequest: there is a name without a password, or none.
    """
    from agentenv.image.credentials import Credentials

    if not username and not password_stdin:
        return None
    password = os.environ.get(PASSWORD_VARIABLE)
    if password_stdin:
        password = sys.stdin.readline().rstrip("\r\n")
    if not username or password is None:
        raise InvalidRequest(
            "a user name at a registry and its password go together",
            remedy=f"--username with --password-stdin, or with {PASSWORD_VARIABLE}",
        )
    return Credentials(username, password)


def init_option(function: F) -> F:
    """`--init agent|systemd`."""
    return click.option(
        "--init",
        type=click.Choice(["agent", "systemd"]),
        help="What is process 1 of its sandboxes (as the image says: systemd if that is its entry point).",
    )(function)
