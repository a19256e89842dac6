"""Commands of snapshots, and of what is made of them: snapshot, fork, rollback."""

from __future__ import annotations

from typing import Any

import click

from agentenv.cli.api import fault_of
from agentenv.cli.assignments import pairs as parsed
from agentenv.cli.assignments import variables
from agentenv.cli.completing import SANDBOX, SNAPSHOT
from agentenv.cli.meter import waiting
from agentenv.cli.naming import NAME, sandbox_of, snapshot_of
from agentenv.cli.options import node_option
from agentenv.cli.output import Column, Row, form_of, form_option, show, show_one
from agentenv.cli.sandboxes import CHANGE_LIMIT_S
from agentenv.cli.server import Node
from agentenv.cli.several import for_each
from agentenv.cli.telling import show_error
from agentenv.client import calls

COLUMNS: tuple[Column, ...] = (
    ("id", lambda row: row["snapshotID"]),
    ("names", lambda row: " ".join(row["names"])),
)
CHILDREN: tuple[Column, ...] = (
    ("id", lambda row: row["sandboxID"]),
    ("template", lambda row: row.get("alias")),
)


@click.group("snapshot")
def command() -> None:
    """Take, list, look at and delete snapshots of sandboxes."""


@command.command("create")
@click.argument("sandbox", type=SANDBOX)
@click.option("--name", metavar="NAME[:TAG]", help="A name, by which sandboxes are started from it.")
@click.option("--disk-only", is_flag=True, help="Of the disk alone: what is started from it boots.")
@form_option
@node_option
def create(node: Node, sandbox: str, name: str | None, disk_only: bool, form: str | None) -> None:
    """Take a snapshot of SANDBOX, which goes on. It is started from like a template.

    \b
    Examples:
      aenv snapshot create isx3k2v9 --name ready
      aenv start ready
    """
    body: dict[str, Any] = {"name": name} if name else {}
    if disk_only:
        body["memory"] = False
    path = f"/sandboxes/{sandbox_of(node, sandbox)}/snapshots"
    with waiting(f"taking a snapshot of {sandbox}"):
        made = node.call("POST", path, body, limit_s=CHANGE_LIMIT_S)
    chosen = form_of(form)
    if chosen == "table":
        show([made], COLUMNS, chosen, key="snapshotID")
    else:
        show_one(made, chosen, key="snapshotID")


@command.command("list")
@click.option("--sandbox", metavar="SANDBOX", help="Those that were taken of it.")
@click.option("--name", metavar="NAME[:TAG]", help="Those of that name.")
@form_option
@node_option
def list_(node: Node, sandbox: str | None, name: str | None, form: str | None) -> None:
    """List snapshots, the newest first.

    \b
    Examples:
      aenv snapshot list
      aenv snapshot list --sandbox work --output ids
    """
    query = {"sandboxID": sandbox_of(node, sandbox) if sandbox else None, "name": name}
    show(list(node.pages("/snapshots", query)), COLUMNS, form_of(form), key="snapshotID")


@command.command("show")
@click.argument("snapshot", type=SNAPSHOT)
@form_option
@node_option
def show_(node: Node, snapshot: str, form: str | None) -> None:
    """Show SNAPSHOT (an id, its beginning, or a name) with its parent and its children.

    \b
    Examples:
      aenv snapshot show ready
    """
    found = node.do(calls.lineage(snapshot_of(node, snapshot)))
    show_one(found, form_of(form), key="snapshotID")


@command.command("delete")
@click.argument("snapshots", nargs=-1, required=True, type=SNAPSHOT, metavar="SNAPSHOT...")
@node_option
def delete(node: Node, snapshots: tuple[str, ...]) -> None:
    """Delete snapshots. What was started from them goes on.

    \b
    Examples:
      aenv snapshot delete ready
      aenv snapshot delete $(aenv snapshot list --sandbox work --output ids)
    """

    def end(name: str) -> str:
        snapshot = snapshot_of(node, name)
        node.call("DELETE", f"/templates/{snapshot}")
        return snapshot

    for_each(snapshots, end, "deleting")


@command.command("tree")
@click.argument("sandbox", type=SANDBOX)
@form_option
@node_option
def tree(node: Node, sandbox: str, form: str | None) -> None:
    """Show the snapshots of SANDBOX, each below the one that it grew from; * is where the sandbox is now.

    \b
    Examples:
      aenv snapshot tree work
    """
    found = node.do(calls.tree(sandbox_of(node, sandbox)))
    if form_of(form) != "table":
        show_one(found, form_of(form), key="sandboxID")
        return
    click.echo(f"{found['sandboxID']} from {found.get('startID') or '-'}")
    _branches(found["branches"], found.get("snapshotID"), "")


def _branches(branches: list[Row], current: str | None, indent: str) -> None:
    for number, branch in enumerate(branches, 1):
        last = number == len(branches)
        mark = " *" if branch["snapshotID"] == current else ""
        names = f" {' '.join(branch['names'])}" if branch["names"] else ""
        click.echo(f"{indent}{'└' if last else '├'}─ {branch['snapshotID']}{names}{mark}")
        _branches(branch["branches"], current, indent + ("   " if last else "│  "))


@click.command("fork")
@click.argument("sandbox", type=SANDBOX)
@click.argument("count", type=click.IntRange(1, 100), default=1)
@click.option("--env", "-e", multiple=True, metavar="NAME[=VALUE]", help="A variable of all children.")
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Something to find them by.")
@click.option("--number", metavar="NAME", help="A variable that counts the children, from 0.")
@click.option("--timeout", type=click.IntRange(min=1), metavar="SECONDS", help="How long they live.")
@form_option
@node_option
def fork(
    node: Node,
    sandbox: str,
    count: int,
    env: tuple[str, ...],
    metadata: tuple[str, ...],
    number: str | None,
    timeout: int | None,
    form: str | None,
) -> None:
    """Start COUNT sandboxes that go on from where SANDBOX is, which goes on as well.

    Variables are for what is run in the children from then on. Those of a sandbox with a name are called
    NAME-1, NAME-2 and so on.

    \b
    Examples:
      aenv fork isx3k2v9 8 --number SEED --metadata run=7 --output ids
    """
    shared, found = variables(env), parsed(metadata, "--metadata")
    parent = node.call("GET", f"/sandboxes/{sandbox_of(node, sandbox)}")
    name = (parent.get("metadata") or {}).get(NAME)
    envs = [{**shared, **({number: str(index)} if number else {})} for index in range(count)]
    # Metadata is inherited, and a name must be one sandbox's.
    own = [{**({NAME: f"{name}-{index}"} if name else {}), **found} for index in range(1, count + 1)]
    call = calls.fork(parent["sandboxID"], count, envs=envs, metadata=own, timeout_s=timeout)
    with waiting(f"forking {sandbox}"):
        results = node.do(call, limit_s=CHANGE_LIMIT_S)
    made = [each["sandbox"] for each in results if each.get("sandbox")]
    show([_without_tokens(each) for each in made], CHILDREN, form_of(form), key="sandboxID")
    failures = [each["error"] for each in results if each.get("error")]
    for failure in failures:
        show_error(fault_of(failure["code"], failure["message"]))
    if failures:
        click.echo(f"aenv: {len(failures)} of {count} were not started", err=True)
        raise click.exceptions.Exit(fault_of(failures[0]["code"], "").exit_code)


def _without_tokens(row: Row) -> Row:
    return {name: value for name, value in row.items() if not name.endswith("Token")}


@click.command("rollback")
@click.argument("sandbox", type=SANDBOX)
@click.argument("snapshot", required=False, type=SNAPSHOT)
@node_option
def rollback(node: Node, sandbox: str, snapshot: str | None) -> None:
    """Put SANDBOX back to one of its own snapshots, or to its start.

    \b
    Examples:
      aenv rollback work ready
      aenv rollback work
    """
    found = sandbox_of(node, sandbox)
    call = calls.rollback(found, snapshot_of(node, snapshot) if snapshot else None)
    with waiting(f"putting {sandbox} back"):
        node.do(call, limit_s=CHANGE_LIMIT_S)
    click.echo(found)
