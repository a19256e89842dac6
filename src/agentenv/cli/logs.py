"""`aenv logs`: what was done with a sandbox, and what its processes said that are the node's to start."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from datetime import datetime
from urllib.parse import urlencode

import click

from agentenv.cli.completing import SANDBOX
from agentenv.cli.following import has_ended, through
from agentenv.cli.naming import sandbox_of
from agentenv.cli.options import node_option
from agentenv.cli.output import Form, Row, form_of, form_option, pairs
from agentenv.cli.server import Node
from agentenv.errors import InvalidRequest

LEVELS = ("debug", "info", "warn", "error")
FOLLOW_EVERY_S = 1.0
MOST = 1000  # lines of one answer
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Log:
    """A sandbox's log as it is read, each line once: the API answers from a millisecond on."""

    def __init__(self, node: Node, sandbox: str, asked: Row, since_ms: int = 0) -> None:
        self._node, self._path, self._asked = node, f"/v2/sandboxes/{sandbox}/logs", asked
        self._cursor = since_ms
        self._seen: set[str] = set()  # lines of the cursor's millisecond
        self._answered = False

    def newest(self, count: int) -> list[Row]:
        """So many of the newest lines, oldest first; `more` goes on after them."""
        page = self._ask({"direction": "backward", "limit": max(count, 1)})
        found = [each for each in reversed(page) if _milliseconds(each) >= self._cursor]
        self._pass(found)
        return found if count else []

    def more(self) -> list[Row]:
        """Lines that were not read yet, oldest first, as many as one answer has; none if there are none."""
        page = self._ask({"cursor": self._cursor})
        new = [each for each in page if _key(each) not in self._seen]
        self._pass(page)
        return new

    def _ask(self, more: Row) -> list[Row]:
        path = f"{self._path}?{urlencode({**self._asked, **more})}"
        answer = through(self._node, path) if self._answered else self._node.ask("GET", path)
        self._answered = True
        found: list[Row] = answer.json()["logs"]
        return found

    def _pass(self, page: list[Row]) -> None:
        if page:
            self._cursor = _milliseconds(page[-1])
            self._seen = {_key(each) for each in page if _milliseconds(each) == self._cursor}


@click.command("logs")
@click.argument("sandbox", type=SANDBOX)
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes, until the sandbox ends.")
@click.option("--tail", "-n", type=click.IntRange(0, MOST), metavar="N", help="The newest N lines only.")
@click.option("--since", metavar="WHEN", help="From then on: 90s, 5m, 2h or 1d ago, or a time (RFC 3339).")
@click.option("--level", type=click.Choice(LEVELS), default="debug", help="Of that level at least.")
@click.option("--search", default="", metavar="TEXT", help="Lines with that in them.")
@form_option
@node_option
def command(
    node: Node,
    sandbox: str,
    follow: bool,
    tail: int | None,
    since: str | None,
    level: str,
    search: str,
    form: str | None,
) -> None:
    """Show the log of SANDBOX, oldest first: what was done with it, and what its start command said. That of
    one that has ended is kept for a while. JSON is an object on each line.

    \b
    Examples:
      aenv logs work --tail 50
      aenv logs -f work --level warn
      aenv logs work --since 10m --output json | jq -r .message
    """
    since_ms = 0 if since is None else milliseconds_of(since, time.time())
    found, chosen = sandbox_of(node, sandbox), form_of(form)
    log = Log(node, found, {"level": level, "search": search}, since_ms)
    if tail is not None:
        _show(log.newest(tail), chosen)
    ended = not follow
    while follow or tail is None:
        while new := log.more():
            _show(new, chosen)
        if ended:
            break
        time.sleep(FOLLOW_EVERY_S)  # the API has no stream of them
        ended = has_ended(node, found)  # before the last look, or its last lines were missed
    if follow:
        click.echo("aenv: the sandbox has ended", err=True)


def _show(entries: Iterable[Row], form: Form) -> None:
    for entry in entries:
        if form == "table":
            fields = pairs({name: value for name, value in entry["fields"].items() if name != "logger"})
            click.echo(f"{entry['timestamp']} {entry['level']:5} {entry['message']} {fields}".rstrip())
        else:
            click.echo(json.dumps(entry))


def milliseconds_of(text: str, now: float) -> int:
    """A time, or how long ago it was, in milliseconds since the epoch; `now` is in seconds since then.

    Raises:
        InvalidRequest: it is neither.
    """
    if found := re.fullmatch(r"(\d{1,9})([smhd])", text):
        return max(0, int((now - int(found[1]) * _UNITS_S[found[2]]) * 1000))
    try:
        return max(0, int(datetime.fromisoformat(text).timestamp() * 1000))
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"--since {text}: it is no time", remedy="such as 5m, 2h, or 2026-01-31T12:00:00Z"
        ) from None


def _milliseconds(entry: Row) -> int:
    return int(datetime.fromisoformat(entry["timestamp"]).timestamp() * 1000)


def _key(entry: Row) -> str:
    return json.dumps(entry, sort_keys=True)
