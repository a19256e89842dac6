"""Commands of what a sandbox may reach, and how fast: network, limits."""

from __future__ import annotations

from typing import IO, Any

import click

from agentenv.cli.attached.creation import add_rules, document
from agentenv.cli.completing import SANDBOX
from agentenv.cli.naming import sandbox_of
from agentenv.cli.options import node_option
from agentenv.cli.output import form_of, form_option, show_one
from agentenv.cli.server import Node

Rate = click.IntRange(min=0)


@click.group("network")
def network() -> None:
    """Look at and replace what sandboxes may reach."""


@network.command("show")
@click.argument("sandbox", type=SANDBOX)
@form_option
@node_option
def show_network(node: Node, sandbox: str, form: str | None) -> None:
    """Show what SANDBOX may reach, as it was asked for.

    \b
    Examples:
      aenv network show work
    """
    found = node.call("GET", f"/sandboxes/{sandbox_of(node, sandbox)}")
    said = {"sandboxID": found["sandboxID"], "allowInternetAccess": found.get("allowInternetAccess")}
    show_one({**said, **(found.get("network") or {})}, form_of(form), key="sandboxID")


@network.command("set")
@click.argument("sandbox", type=SANDBOX)
@click.option("--internet/--no-internet", default=None, help="Whether it reaches what no rule names.")
@click.option("--allow", multiple=True, metavar="WHERE", help="It reaches that alone: address, range, name.")
@click.option("--deny", multiple=True, metavar="WHERE", help="It does not reach this: address or range.")
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
      aenv network set isx3k2v9 --allow pypi.org --allow files.pythonhosted.org
      aenv network set isx3k2v9 --internet
    """
    body: dict[str, Any] = {}
    if internet is not None:
        body["allow_internet_access"] = internet
    add_rules(body, allow, deny)
    if dns:
        body["dnsServers"] = list(dns)
    if file is not None:
        if body:
            raise click.UsageError("--file says all of it: give no other option beside it")
        body = document(file, "--file")
    elif not body:
        raise click.UsageError("say what it may reach: --internet lifts all rules")
    found = sandbox_of(node, sandbox)
    node.call("PUT", f"/sandboxes/{found}/network", body)
    click.echo(found)


@click.group("limits")
def limits() -> None:
    """Look at and replace how fast sandboxes may be."""


@limits.command("show")
@click.argument("sandbox", type=SANDBOX)
@form_option
@node_option
def show_limits(node: Node, sandbox: str, form: str | None) -> None:
    """Show the limits of SANDBOX: bytes and operations per second.

    \b
    Examples:
      aenv limits show work
    """
    found = node.call("GET", f"/sandboxes/{sandbox_of(node, sandbox)}")
    show_one({"sandboxID": found["sandboxID"], **(found.get("limits") or {})}, form_of(form), key="sandboxID")


@limits.command("set")
@click.argument("sandbox", type=SANDBOX)
@click.option("--rx", type=Rate, metavar="BYTES", help="Received from the network, per second; 0: no limit.")
@click.option("--tx", type=Rate, metavar="BYTES", help="Sent to the network, per second.")
@click.option("--disk", type=Rate, metavar="BYTES", help="Read from and written to disks, per second.")
@click.option("--iops", type=Rate, metavar="N", help="Operations of disks per second.")
@node_option
def set_limits(
    node: Node, sandbox: str, rx: int | None, tx: int | None, disk: int | None, iops: int | None
) -> None:
    """Replace the limits of SANDBOX: what is not said is the node's default. In force at once.

    \b
    Examples:
      aenv limits set work --rx 10000000 --iops 500
      aenv limits set work
    """
    from agentenv.client import calls
    from agentenv.limits import DiskLimits, Limits, NetworkLimits

    wanted = Limits(
        NetworkLimits(rx_bytes_per_second=rx, tx_bytes_per_second=tx),
        DiskLimits(bytes_per_second=disk, iops=iops),
    )
    found = sandbox_of(node, sandbox)
    node.do(calls.set_limits(found, wanted))
    click.echo(found)
