"""Commands of the life of sandboxes: list, show, pause, resume, timeout, delete."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from urllib.parse import urlencode

import click

from agentenv.cli.completing import SANDBOX
from agentenv.cli.naming import NAME, sandbox_of, sandboxes
from agentenv.cli.options import node_option
from agentenv.cli.output import Column, Form, Row, age, form_of, form_option, pairs, show, show_one
from agentenv.cli.server import Node
from agentenv.cli.several import for_each
from agentenv.errors import InvalidRequest

CHANGE_LIMIT_S = 600.0
PAGE = 100  # the most that the API answers at once
COLUMNS: tuple[Column, ...] = (
    ("id", lambda row: row["sandboxID"]),
    ("name", lambda row: (row.get("metadata") or {}).get(NAME)),
    ("template", lambda row: row.get("alias") or row["templateID"]),
    ("state", lambda row: row["state"]),
    ("started", lambda row: age(row["startedAt"])),
    ("ends", lambda row: age(row["endAt"])),
    ("cpus", lambda row: row["cpuCount"]),
    ("mib", lambda row: row["memoryMB"]),
    ("metadata", lambda row: pairs(_other(row.get("metadata") or {}))),
)


def _other(metadata: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in metadata.items() if name != NAME}


@click.command("list")
@click.option("--state", type=click.Choice(["running", "paused"]), help="Those alone.")
@click.option(
    "--metadata", multiple=True, metavar="KEY=VALUE", help="Those with that, with all where several."
)
@click.option("--template", metavar="NAME", help="Those of that template.")
@click.option("--limit", type=click.IntRange(min=1), help="So many at most.")
@click.option("--watch", "-w", is_flag=True, help="Show them anew whenever something happens.")
@form_option
@node_option
def list_(
    node: Node,
    state: str | None,
    metadata: tuple[str, ...],
    template: str | None,
    limit: int | None,
    watch: bool,
    form: str | None,
) -> None:
    """List sandboxes, the newest first.

    \b
    Examples:
      aenv list
      aenv list --state paused --metadata run=7 --output ids
      aenv list --watch
    """
    chosen = form_of(form)

    def look() -> list[Row]:
        return selected(node, state, metadata, template, limit)

    if watch:
        _watch(node, look, chosen)
    else:
        show(look(), COLUMNS, chosen, key="sandboxID")


def _watch(node: Node, look: Callable[[], list[Row]], form: Form) -> None:
    """Show what there is once events are followed, so that none is missed, and after each event."""
    from agentenv.cli.following import events

    def again() -> None:
        if form == "table" and sys.stdout.isatty():
            click.clear()
        show(look(), COLUMNS, form, key="sandboxID")
        sys.stdout.flush()

    for _ in events(node, {}, opened=again):
        again()


def selected(
    node: Node,
    state: str | None,
    metadata: tuple[str, ...],
    template: str | None,
    limit: int | None = None,
) -> list[Row]:
    """The sandboxes that filters leave, `limit` of them at most.

    Raises:
        InvalidRequest: metadata is not KEY=VALUE.
    """
    for each in metadata:
        if "=" not in each:
            raise InvalidRequest(f"--metadata {each}: it is KEY=VALUE")
    wanted = urlencode([(name, value) for name, _, value in (each.partition("=") for each in metadata)])
    page = str(limit) if limit is not None and limit < PAGE else None
    found = sandboxes(node, state=state, metadata=wanted, template=template, limit=page)
    return list(islice(found, limit))


@click.command("show")
@click.argument("sandbox", type=SANDBOX)
@form_option
@node_option
def show_(node: Node, sandbox: str, form: str | None) -> None:
    """Show all that the node says of SANDBOX, but its tokens.

    \b
    Examples:
      aenv show work
      aenv show work --output json | jq -r .state
    """
    found = node.call("GET", f"/sandboxes/{sandbox_of(node, sandbox)}")
    found.pop("envdAccessToken", None)
    show_one(found, form_of(form), key="sandboxID")


@click.command("pause")
@click.argument("names", nargs=-1, required=True, type=SANDBOX, metavar="SANDBOX...")
@click.option("--disk-only", is_flag=True, help="Keep the disk alone: it boots when it is resumed.")
@node_option
def pause(node: Node, names: tuple[str, ...], disk_only: bool) -> None:
    """Pause sandboxes: no process and no memory, until they are resumed.

    \b
    Examples:
      aenv pause work
      aenv pause $(aenv list --metadata run=7 --output ids)
    """
    body = {"memory": False} if disk_only else {}

    def stop(name: str) -> str:
        sandbox = sandbox_of(node, name)
        node.call("POST", f"/sandboxes/{sandbox}/pause", body, limit_s=CHANGE_LIMIT_S)
        return sandbox

    for_each(names, stop, "pausing")


@click.command("resume")
@click.argument("names", nargs=-1, required=True, type=SANDBOX, metavar="SANDBOX...")
@click.option(
    "--timeout",
    type=click.IntRange(min=1),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="How long they are to live at least.",
)
@node_option
def resume(node: Node, names: tuple[str, ...], timeout: int) -> None:
    """Have paused sandboxes run again, where they were; those that run live on.

    \b
    Examples:
      aenv resume work --timeout 3600
    """

    def wake(name: str) -> str:
        sandbox = sandbox_of(node, name)
        node.call("POST", f"/v2/sandboxes/{sandbox}/connect", {"timeout": timeout}, limit_s=CHANGE_LIMIT_S)
        return sandbox

    for_each(names, wake, "resuming")


@click.command("timeout")
@click.argument("sandbox", type=SANDBOX)
@click.argument("seconds", type=click.IntRange(min=0))
@node_option
def timeout(node: Node, sandbox: str, seconds: int) -> None:
    """Have SANDBOX live SECONDS from now.

    \b
    Examples:
      aenv timeout work 7200
    """
    found = sandbox_of(node, sandbox)
    node.call("POST", f"/sandboxes/{found}/timeout", {"timeout": seconds})
    click.echo(found)


@click.command("delete")
@click.argument("names", nargs=-1, type=SANDBOX, metavar="SANDBOX...")
@click.option("--all", "every", is_flag=True, help="All of the project, after a question.")
@click.option("--state", type=click.Choice(["running", "paused"]), help="All in that state.")
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="All with that metadata.")
@click.option("--yes", "-y", is_flag=True, help="Ask nothing.")
@node_option
def delete(
    node: Node, names: tuple[str, ...], every: bool, state: str | None, metadata: tuple[str, ...], yes: bool
) -> None:
    """End sandboxes, with all that only they have.

    \b
    Examples:
      aenv delete isx3k2v9
      aenv delete --metadata run=7 --yes
    """
    by_filter = every or bool(state or metadata)
    if bool(names) == by_filter:
        raise click.UsageError("name sandboxes, or say which with --all, --state or --metadata")
    wanted = list(names)
    if by_filter:
        wanted = [each["sandboxID"] for each in selected(node, state, metadata, None)]
        if wanted and not yes:
            what = "1 sandbox" if len(wanted) == 1 else f"{len(wanted)} sandboxes"
            click.confirm(f"End {what}?", abort=True, err=True)

    def end(name: str) -> str:
        sandbox = sandbox_of(node, name)
        # One that a filter found may have ended by itself meanwhile.
        gone = (404,) if by_filter else ()
        node.ask("DELETE", f"/sandboxes/{sandbox}", limit_s=CHANGE_LIMIT_S, refused=gone)
        return sandbox

    for_each(wanted, end, "deleting")
