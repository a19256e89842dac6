"""`aenv auth`: the servers that a user knows."""

from __future__ import annotations

import sys

import click

from agentenv.cli import profiles
from agentenv.cli.completing import PROFILE
from agentenv.cli.options import node_option
from agentenv.cli.output import Column, form_of, form_option, show, show_one
from agentenv.cli.profiles import Profile
from agentenv.cli.server import Node
from agentenv.errors import InvalidRequest

_SHOWN = 8  # letters of a key


@click.group("auth")
def command() -> None:
    """Know several servers by name, each with its key.

    A command asks the server of --url, --profile or --home; else of AENV_PROFILE; else of E2B_API_URL; else
    the one in use here; else the node of this machine. A key goes to its own server alone.
    """


@command.command("login")
@click.argument("url")
@click.option("--name", default="default", show_default=True, help="What it is to be called.")
@click.option("--no-check", is_flag=True, help="Do not ask the server whether the key holds.")
def login(url: str, name: str, no_check: bool) -> None:
    """Keep the server at URL with its API key, which is asked for or read from standard input, and use it.

    \b
    Examples:
      aenv auth login https://api.sandbox.example.com:8443 --name team
      pass show aenv/team | aenv auth login https://api.sandbox.example.com:8443 --name team
    """
    key = click.prompt("API key", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip()
    if not key:
        raise InvalidRequest("no API key was given", remedy="type it, or pipe it in")
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{url} is no URL", remedy="begin it with https:// or http://")
    if not no_check:
        Node(url, key).call("GET", "/v2/sandboxes?limit=1")
    profiles.save(profiles.load().with_one(name, Profile(url.rstrip("/"), key)))
    click.echo(f"{name} is used from now on", err=True)


@command.command("list")
@form_option
def list_(form: str | None) -> None:
    """List the servers; of a key its beginning is shown.

    \b
    Examples:
      aenv auth list
    """
    known = profiles.load()
    rows = [
        {"name": name, "url": each.url, "key": f"{each.api_key[:_SHOWN]}…", "used": name == known.used}
        for name, each in sorted(known.known.items())
    ]
    columns: tuple[Column, ...] = (
        ("name", lambda row: row["name"] + (" *" if row["used"] else "")),
        ("url", lambda row: row["url"]),
        ("key", lambda row: row["key"]),
    )
    show(rows, columns, form_of(form), key="name")


@command.command("show")
@form_option
@node_option
def show_(node: Node, form: str | None) -> None:
    """Show which server is meant, by what is said here, set, and in use; of its key the beginning.

    \b
    Examples:
      aenv auth show
      aenv auth show --profile team
    """
    found = {"url": node.url, "key": f"{node.headers['X-API-KEY'][:_SHOWN]}…"}
    show_one(found, form_of(form), key="url")


@command.command("use")
@click.argument("name", type=PROFILE)
def use(name: str) -> None:
    """Use the server NAME from now on.

    \b
    Examples:
      aenv auth use team
    """
    profiles.save(profiles.load().using(name))


@command.command("logout")
@click.argument("name", type=PROFILE)
def logout(name: str) -> None:
    """Forget the server NAME and its key.

    \b
    Examples:
      aenv auth logout team
    """
    profiles.save(profiles.load().without(name))
