"""Commands of what a sandbox may reach, and how fast: network, limits."""

from __future__ import annotations

import json
from typing import IO, Any

import click

from agentenv.cli.naming import sandbox_of
from agentenv.cli.options import node_option
from agentenv.cli.output import form_of, form_option, show_one
from agentenv.cli.server import Node
from agentenv.errors import InvalidRequest

Rate = click.IntRange(min=0)


@click.group("network")
def network() -> None:
    """Look at and replace what sandboxes may reach."""


@network.command("show")
@click.argument("sandbox")
@form_option
@node_option
def show_network(node: Node, sandbox: str, form: str | None) -> None:
    """Show what SANDBOX may reach, as it was asked for."""
    found = node.call("GET", f"/sandboxes/{sandbox_of(node, sandbox)}")
    said = {"sandboxID": found["sandboxID"], "allowInternetAccess": found.get("allowInternetAccess")}
    show_one({**said, **(found.get("network") or {})}, form_of(form), key="sandboxID")


@network.command("set")
@click.argument("sandbox")
@click.option("--internet/--no-internet", default=None, help="Whether it reaches what no rule names.")
@click.option("--allow", multiple=True, metavar="WHERE", help="An address, range or name that it reaches.")
@click.option("--deny", multiple=True, metavar="WHERE", help="An address or range that it does not reach.")
@click.option("--dns", multiple=True, metavar="ADDRESS", help="A name server that is asked for it.")
@click.option("--file", type=click.File("r"), metavar="FILE", help="All of it as JSON, with the API's names.")
@node_option
def set_network(
    node: Node,
    sandbox: str,
    internet: bool | None,
    allow: tuple[str, ...],
    deny: tuple[str, ...],
    dns: tuple[str, ...],
    file: IO[str] | None,
) -> None:
    """Replace what SANDBOX may reach: what is not said is as if it had never been. In force at once.

    \b
    Examples:
      aenv network set isx3k2v9 --no-internet --allow pypi.org --allow files.pythonhosted.org
      aenv network set isx3k2v9 --internet
    """
    body: dict[str, Any] = {}
    if internet is not None:
        body["allow_internet_access"] = internet
    for name, values in (("allowOut", allow), ("denyOut", deny), ("dnsServers", dns)):
        if values:
            body[name] = list(values)
    if file is not None:
        if body:
            raise click.UsageError("--file says all of it: give no other option beside it")
        body = _document(file)
    elif not body:
        raise click.UsageError("say what it may reach: --internet lifts all rules")
    found = sandbox_of(node, sandbox)
    node.call("PUT", f"/sandboxes/{found}/network", body)
    click.echo(found)


@click.group("limits")
def limits() -> None:
    """Look at and replace how fast sandboxes may be."""


@limits.command("show")
@click.argument("sandbox")
@form_option
@node_option
def show_limits(node: Node, sandbox: str, form: str | None) -> None:
    """Show the limits of SANDBOX: bytes and operations per second."""
    found = node.call("GET", f"/sandboxes/{sandbox_of(node, sandbox)}")
    show_one({"sandboxID": found["sandboxID"], **(found.get("limits") or {})}, form_of(form), key="sandboxID")


@limits.command("set")
@click.argument("sandbox")
@click.option("--rx", type=Rate, metavar="BYTES", help="Received from the network, per second; 0: no limit.")
@click.option("--tx", type=Rate, metavar="BYTES", help="Sent to the network, per second.")
@click.option("--disk", type=Rate, metavar="BYTES", help="Read from and written to disks, per second.")
@click.option("--iops", type=Rate, metavar="N", help="Operations of disks per second.")
@node_option
def set_limits(
    node: Node, sandbox: str, rx: int | None, tx: int | None, disk: int | None, iops: int | None
) -> None:
    """Replace the limits of SANDBOX: what is not said is the node's default. In force at once."""
    body = {
        "network": {"rxBytesPerSecond": rx, "txBytesPerSecond": tx},
        "disk": {"bytesPerSecond": disk, "iops": iops},
    }
    found = sandbox_of(node, sandbox)
    node.call("PUT", f"/sandboxes/{found}/limits", body)
    click.echo(found)


def _document(file: IO[str]) -> dict[str, Any]:
    try:
        found = json.load(file)
    except ValueError as error:
        raise InvalidRequest(f"{file.name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{file.name} is not an object")
    return found
