"""Options that several commands share, and the settings made from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

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


def output_option(function: F) -> F:
    """`--output table|json`."""
    return click.option(
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="Form of the answer.",
    )(function)
