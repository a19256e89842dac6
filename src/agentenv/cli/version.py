"""`aenv version`: what runs here, and what the node that is asked runs."""

from __future__ import annotations

import click

from agentenv import __version__


@click.command("version")
def command() -> None:
    """Print the version of this program."""
    click.echo(__version__)
