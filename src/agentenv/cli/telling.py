"""Errors as people see them: what happened, and what can be done."""

from __future__ import annotations

import click

from agentenv.errors import AenvError, CapacityExceeded, GuestFault


def show_error(error: AenvError) -> None:
    """What happened and what to do, on stderr."""
    click.echo(f"aenv: {error.message}", err=True)
    if error.remedy:
        click.echo(f"  try: {error.remedy}", err=True)
    elif isinstance(error, (CapacityExceeded, GuestFault)):
        click.echo("  look at: aenv node status, and the node's log", err=True)
