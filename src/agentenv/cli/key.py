"""`aenv key`: the API keys of a node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from agentenv.cli.meant import node_address
from agentenv.cli.options import node_options, output_option
from agentenv.cli.server import Node

SHOWN = ("id", "name", "project", "scopes", "key", "quota", "rate")


@click.group("key")
def command() -> None:
    """Make, list, rotate and revoke API keys; this takes a key with the scope admin."""


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
@output_option
@node_options
def create(
    name: str,
    project: str,
    admin: bool,
    rate: float | None,
    burst: int | None,
    output: str,
    url: str | None,
    api_key: str | None,
    home: Path | None,
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
    _print_secret(_node(url, api_key, home).call("POST", "/api-keys", body), output)


@command.command("list")
@output_option
@node_options
def list_(output: str, url: str | None, api_key: str | None, home: Path | None) -> None:
    """List the keys that hold. What is shown of a key is its beginning."""
    found = _node(url, api_key, home).call("GET", "/api-keys")
    if output == "json":
        click.echo(json.dumps(found, indent=2))
        return
    rows = [SHOWN, *(_row(key) for key in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(SHOWN))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@command.command("rotate")
@click.argument("key")
@output_option
@node_options
def rotate(key: str, output: str, url: str | None, api_key: str | None, home: Path | None) -> None:
    """Give KEY (its id or name) another secret and print that; the one before holds no longer."""
    node = _node(url, api_key, home)
    _print_secret(node.call("POST", f"/api-keys/{quote(key, safe='')}/rotate"), output)


@command.command("revoke")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@node_options
def revoke(keys: tuple[str, ...], url: str | None, api_key: str | None, home: Path | None) -> None:
    """Let each KEY (its id or name) hold no longer. What was made with it stays the project's."""
    node = _node(url, api_key, home)
    for key in keys:
        node.call("DELETE", f"/api-keys/{quote(key, safe='')}")
        click.echo(key)


def _node(url: str | None, api_key: str | None, home: Path | None) -> Node:
    return Node(*node_address(url, api_key, home))


def _print_secret(made: dict[str, Any], output: str) -> None:
    click.echo(json.dumps(made) if output == "json" else made["key"])


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    quota = {name: value for name, value in (key.get("quota") or {}).items() if value is not None}
    rate = key.get("rateLimit")
    return (
        key["id"],
        key["name"],
        key["project"],
        ",".join(key["scopes"]),
        f"{key['mask']['prefix']}{key['mask']['maskedValuePrefix']}…",
        " ".join(f"{name}={value}" for name, value in quota.items()) or "-",
        f"{rate['perSecond']:g}/s" if rate else "-",
    )
