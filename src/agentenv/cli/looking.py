"""Commands that look at what sandboxes do: metrics, events, operations."""

from __future__ import annotations

import json
import time

import click

from agentenv.amounts import readable
from agentenv.cli.completing import SANDBOX
from agentenv.cli.following import ENDED, has_ended, through
from agentenv.cli.following import events as followed
from agentenv.cli.naming import sandbox_of
from agentenv.cli.options import node_option
from agentenv.cli.output import Column, Form, Row, form_of, form_option, pairs, show
from agentenv.cli.server import Node
from agentenv.client import calls

WATCH_EVERY_S = 5.0  # how often the node takes samples
METRICS: tuple[Column, ...] = (
    ("time", lambda row: row["timestamp"]),
    ("cpu", lambda row: f"{row['cpuUsedPct']:.0f}% of {row['cpuCount']}"),
    ("memory", lambda row: f"{readable(row['memUsed'])} of {readable(row['memTotal'])}"),
    ("disk", lambda row: f"{readable(row['diskUsed'])} of {readable(row['diskTotal'])}"),
)


@click.command("metrics")
@click.argument("sandbox", type=SANDBOX)
@click.option("--watch", "-w", is_flag=True, help="Go on with what comes.")
@click.option("--last", type=click.IntRange(min=1), default=10, show_default=True, help="So many samples.")
@form_option
@node_option
def metrics(node: Node, sandbox: str, watch: bool, last: int, form: str | None) -> None:
    """Show what SANDBOX took of its processors, memory and disk lately. With --watch, JSON is an object on
    each line.

    \b
    Examples:
      aenv metrics work
      aenv metrics work --watch
    """
    found, chosen = sandbox_of(node, sandbox), form_of(form)
    path = f"/sandboxes/{found}/metrics"
    rows = node.call("GET", path)[-last:]
    if watch and chosen != "table":
        _more(rows, chosen)
    else:
        show(rows, METRICS, chosen, key="timestamp")
    while watch:
        since = rows[-1]["timestampUnix"] + 1 if rows else 0
        ended = has_ended(node, found)  # before the last look, or its last samples were missed
        answer = through(node, f"{path}?start={since}", refused=ENDED)
        if answer.status not in ENDED and (new := answer.json()):
            rows = new
            _more(rows, chosen)
        if ended or answer.status in ENDED:
            click.echo("aenv: the sandbox has ended", err=True)
            return
        time.sleep(WATCH_EVERY_S)


def _more(rows: list[Row], form: Form) -> None:
    for row in rows:
        if form == "table":
            click.echo("  ".join(str(read(row)) for _, read in METRICS))
        else:
            click.echo(json.dumps(row))


@click.command("events")
@click.option("--sandbox", "names", multiple=True, metavar="SANDBOX", help="Of those alone.")
@click.option("--kind", multiple=True, metavar="KIND", help="Such as created, paused, killed, build_ready.")
@click.option("--after", metavar="ID", help="Those after that event first.")
@click.option("--count", type=click.IntRange(min=1), help="End after so many.")
@form_option
@node_option
def events(
    node: Node,
    names: tuple[str, ...],
    kind: tuple[str, ...],
    after: str | None,
    count: int | None,
    form: str | None,
) -> None:
    """Follow what happens on the node, as it happens; a connection that breaks off is taken up again.

    \b
    Examples:
      aenv events
      aenv events --kind failed --output json | jq .detail
    """
    chosen = form_of(form)
    query = {"sandbox_id": [sandbox_of(node, name) for name in names], "kind": kind}
    for number, event in enumerate(followed(node, query, after=after), 1):
        if chosen == "table":
            about = event.get("sandboxID") or event.get("buildID") or ""
            words = (event.get("timestamp", ""), event.get("kind", "lost"), about, pairs(event.get("detail")))
            click.echo("  ".join(words).rstrip())
        else:
            click.echo(event.get("id", "") if chosen == "ids" else json.dumps(event))
        if number == count:
            return


def _phase(phase: Row) -> str:
    return f"{phase['name']}={phase['seconds'] * 1000:.1f}"


@click.command("operations")
@click.argument("sandbox", type=SANDBOX)
@form_option
@node_option
def operations(node: Node, sandbox: str, form: str | None) -> None:
    """Show what the last operations on SANDBOX spent their time on.

    \b
    Examples:
      aenv operations work
    """
    found = node.do(calls.operations(sandbox_of(node, sandbox)))
    columns: tuple[Column, ...] = (
        ("operation", lambda row: row["operation"]),
        ("ms", lambda row: f"{row['seconds'] * 1000:.1f}"),
        ("phases", lambda row: " ".join(map(_phase, row["phases"]))),
    )
    show(found, columns, form_of(form), key="operation")
