"""`aenv version`: what runs here, and what the node that is asked runs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from agentenv import __version__
from agentenv.cli.meant import node_address
from agentenv.cli.options import node_options
from agentenv.cli.output import form_of, form_option
from agentenv.errors import AenvError

LIMIT_S = 2.0


@click.command("version")
@form_option
@node_options
def command(form: str | None, url: str | None, api_key: str | None, home: Path | None) -> None:
    """Print the version of this program, and of the node that is meant if it is there.

    \b
    Examples:
      aenv version
      aenv version --output json | jq -r .node.version
    """
    there, version = _node(url, api_key, home)
    if form_of(form) == "json":
        node = {"url": there, "version": version} if there else None
        click.echo(json.dumps({"aenv": __version__, "node": node}, indent=2))
        return
    click.echo(f"aenv {__version__}")
    if there:
        click.echo(f"node {version or 'is not reached'} ({there})")


def _node(url: str | None, api_key: str | None, home: Path | None) -> tuple[str, str | None]:
    """The URL of the node that is meant, if one is, and its version, if it says it."""
    from agentenv.cli.api import send

    there = ""
    try:
        there, _ = node_address(url, api_key, home)
        answer = send("GET", f"{there.rstrip('/')}/health", limit_s=LIMIT_S)
    except AenvError:  # where there is none, there is none to tell of
        return there, None
    return there, answer.headers.get("x-agentenv-version")
