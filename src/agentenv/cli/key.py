"""`aenv key`: the API keys of a node."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import click

from agentenv.cli.options import node_option
from agentenv.cli.output import Column, Row, form_of, form_option, pairs, show
from agentenv.cli.server import Node
from agentenv.cli.several import for_each

COLUMNS: tuple[Column, ...] = (
    ("id", lambda row: row["id"]),
    ("name", lambda row: row["name"]),
    ("project", lambda row: row["project"]),
    ("scopes", lambda row: ",".join(row["scopes"])),
    ("key", lambda row: f"{row['mask']['prefix']}{row['mask']['maskedValuePrefix']}…"),
    ("quota", lambda row: pairs(_given(row.get("quota") or {}))),
    ("rate", lambda row: f"{row['rateLimit']['perSecond']:g}/s" if row.get("rateLimit") else None),
)
secret_option = click.option(
    "--output",
    "-o",
    "form",
    type=click.Choice(["key", "json"]),
    default="key",
    show_default=True,
    help="The key alone, or all that is known of it.",
)


@click.group("key")
def command() -> None:
    """Make, list, rotate and revoke API keys, as an admin.

    It takes a key with the scope admin.
    """


@command.command("create")
@click.argument("name")
@click.option("--project", default="default", show_default=True, help="Whose objects it reaches.")
@click.option("--admin", is_flag=True, help="It may also manage keys and act for other projects.")
@click.option("--sandboxes", type=click.IntRange(min=0), help="Quota: sandboxes, paused ones too.")
@click.option("--vcpus", type=click.IntRange(min=0), help="Quota: processors of those that run.")
@click.option("--memory", type=click.IntRange(min=0), metavar="MIB", help="Quota: memory of those that run.")
@click.option("--disk", type=click.IntRange(min=0), metavar="MIB", help="Quota: what all may write.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Requests per second.")
@click.option("--burst", type=click.IntRange(min=1), metavar="N", help="Requests at once after a rest.")
@secret_option
@node_option
def create(
    node: Node,
    name: str,
    project: str,
    admin: bool,
    rate: float | None,
    burst: int | None,
    form: str,
    **quota: int | None,
) -> None:
    """Make the API key NAME and print it: nobody can ask for it again.

    \b
    Examples:
      aenv key create alice
      aenv key create team-blue --project blue --sandboxes 100 --memory 65536 --rate 50
    """
    body: dict[str, Any] = {
        "name": name,
        "project": project,
        "scopes": ["admin", "use"] if admin else ["use"],
        "quota": {
            "sandboxes": quota["sandboxes"],
            "vcpus": quota["vcpus"],
            "memoryMB": quota["memory"],
            "diskSizeMB": quota["disk"],
        },
    }
    if rate is not None:
        body["rateLimit"] = {"perSecond": rate, "burst": burst}
    _print_secret(node.call("POST", "/api-keys", body), form)


@command.command("list")
@form_option
@node_option
def list_(node: Node, form: str | None) -> None:
    """List the keys that hold. What is shown of a key is its beginning.

    \b
    Examples:
      aenv key list
    """
    show(node.call("GET", "/api-keys"), COLUMNS, form_of(form), key="id")


@command.command("rotate")
@click.argument("key")
@secret_option
@node_option
def rotate(node: Node, key: str, form: str) -> None:
    """Give KEY (its id or name) another secret and print that; the one before holds no longer.

    \b
    Examples:
      aenv key rotate alice
    """
    _print_secret(node.call("POST", f"/api-keys/{quote(key, safe='')}/rotate"), form)


@command.command("revoke")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@node_option
def revoke(node: Node, keys: tuple[str, ...]) -> None:
    """Let each KEY (its id or name) hold no longer. What was made with it stays the project's.

    \b
    Examples:
      aenv key revoke alice
    """

    def end(key: str) -> str:
        node.call("DELETE", f"/api-keys/{quote(key, safe='')}")
        return key

    for_each(keys, end, "revoking")


def _print_secret(made: Row, form: str) -> None:
    click.echo(json.dumps(made, indent=2) if form == "json" else made["key"])


def _given(quota: Row) -> Row:
    return {name: value for name, value in quota.items() if value is not None}
