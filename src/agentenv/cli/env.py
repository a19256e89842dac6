"""`aenv env`: the variables that point E2B clients at the local node."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentenv.cli.options import home_option
from agentenv.errors import Conflict, NotFound, Unauthorized

if TYPE_CHECKING:
    from agentenv.config import Settings


@click.command("env")
@home_option
def command(home: Path | None) -> None:
    """Print `export` lines for the local node.

    \b
    Examples:
      eval "$(aenv env)"
    """
    from agentenv import config

    settings = config.load(home=home)
    for name, value in variables(settings).items():
        click.echo(f"export {name}={shlex.quote(value)}")


def variables(settings: Settings) -> dict[str, str]:
    """The variables for the node that serves this data directory now.

    Raises:
        Conflict: no node runs on it. Unauthorized: its key file is not readable.
    """
    from agentenv.run_record import read

    record = read(settings)
    if record is None:
        raise Conflict(f"no node runs on {settings.home}", remedy="aenv node start")
    return {"E2B_API_URL": record.url, "E2B_SANDBOX_URL": record.url, "E2B_API_KEY": api_key(settings)}


def api_key(settings: Settings) -> str:
    """The API key from the settings or the key file."""
    if settings.api_key:
        return settings.api_key
    try:
        return settings.api_key_file.read_text().strip()
    except FileNotFoundError:
        raise NotFound(f"{settings.api_key_file} is not there", remedy="aenv node start makes it") from None
    except PermissionError:
        user = os.environ.get("USER", "this user")
        raise Unauthorized(
            f"{settings.api_key_file} is not readable for {user}",
            remedy="run the command as the file's owner",
        ) from None
