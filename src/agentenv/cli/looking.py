"""Commands that look at what sandboxes do: logs, metrics, events, operations."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from urllib.parse import urlencode

import click

from agentenv.cli.completing import SANDBOX
from agentenv.cli.following import events as followed
from agentenv.cli.naming import sandbox_of
from agentenv.cli.options import node_option
from agentenv.cli.output import Column, Form, Row, form_of, form_option, pairs, show, size
from agentenv.cli.server import Node

LEVELS = ("debug", "info", "warn", "error")
FOLLOW_EVERY_S = 1.0
WATCH_EVERY_S = 5.0  # how often the node takes samples
METRICS: tuple[Column, ...] = (
    ("time", lambda row: row["timestamp"]),
    ("cpu", lambda row: f"{row['cpuUsedPct']:.0f}% of {row['cpuCount']}"),
    ("memory", lambda row: f"{size(row['memUsed'])} of {size(row['memTotal'])}"),
    ("disk", lambda row: f"{size(row['diskUsed'])} of {size(row['diskTotal'])}"),
)


@click.command("logs")
@click.argument("sandbox", type=SANDBOX)
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes.")
@click.option("--level", type=click.Choice(LEVELS), default="debug", help="Of that level at least.")
@click.option("--search", default="", metavar="TEXT", help="Lines with that in them.")
@form_option
@node_option
def logs(node: Node, sandbox: str, follow: bool, level: str, search: str, form: str | None) -> None:
    """Show the log of SANDBOX: what was done with it, and what its start command said."""
    found, chosen = sandbox_of(node, sandbox), form_of(form)
    for entry in _entries(node, found, {"level": level, "search": search}, follow=follow):
        if chosen == "table":
            fields = pairs({name: value for name, value in entry["fields"].items() if name != "logger"})
            click.echo(f"{entry['timestamp']} {entry['level']:5} {entry['message']} {fields}".rstrip())
        else:
            click.echo(json.dumps(entry))


def _entries(node: Node, sandbox: str, query: dict[str, str], *, follow: bool) -> Iterator[Row]:
    """Entries, oldest first. The API has no stream of them: those that follow are asked for every second."""
    seen: set[str] = set()
    cursor = 0
    while True:
        page = node.call("GET", f"/v2/sandboxes/{sandbox}/logs?{urlencode({**query, 'cursor': cursor})}")[
            "logs"
        ]
        new = [entry for entry in page if json.dumps(entry, sort_keys=True) not in seen]
        yield from new
        if page:
            last = page[-1]["timestamp"]
            seen = {json.dumps(each, sort_keys=True) for each in page if each["timestamp"][:23] == last[:23]}
            cursor = _milliseconds(last)
        if new:
            continue
        if not follow:
            return
        time.sleep(FOLLOW_EVERY_S)


def _milliseconds(moment: str) -> int:
    from datetime import datetime

    return int(datetime.fromisoformat(moment).timestamp() * 1000)


@click.command("metrics")
@click.argument("sandbox", type=SANDBOX)
@click.option("--watch", "-w", is_flag=True, help="Go on with what comes.")
@click.option("--last", type=click.IntRange(min=1), default=10, show_default=True, help="So many samples.")
@form_option
@node_option
def metrics(node: Node, sandbox: str, watch: bool, last: int, form: str | None) -> None:
    """Show what SANDBOX took of its processors, memory and disk lately."""
    found, chosen = sandbox_of(node, sandbox), form_of(form)
    path = f"/sandboxes/{found}/metrics"
    rows = node.call("GET", path)[-last:]
    show(rows, METRICS, chosen, key="timestamp")
    while watch:
        time.sleep(WATCH_EVERY_S)
        since = rows[-1]["timestampUnix"] + 1 if rows else 0
        if new := node.call("GET", f"{path}?start={since}"):
            rows = new
            _more(rows, chosen)


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
    """Show what the last operations on SANDBOX spent their time on."""
    found = node.call("GET", f"/sandboxes/{sandbox_of(node, sandbox)}/operations")
    columns: tuple[Column, ...] = (
        ("operation", lambda row: row["operation"]),
        ("ms", lambda row: f"{row['seconds'] * 1000:.1f}"),
        ("phases", lambda row: " ".join(map(_phase, row["phases"]))),
    )
    show(found, columns, form_of(form), key="operation")
