"""`aenv template`: make, list, export and delete templates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentenv.cli.completing import TEMPLATE
from agentenv.cli.meant import node_address, remote
from agentenv.cli.naming import template_of
from agentenv.cli.options import (
    credential_options,
    credentials,
    home_option,
    init_option,
    node_option,
    node_options,
    quiet_option,
)
from agentenv.cli.output import Column, Row, form_of, form_option, show, show_one
from agentenv.cli.progress import Steps
from agentenv.cli.root import require_root
from agentenv.cli.server import Node
from agentenv.cli.several import for_each
from agentenv.errors import AenvError, NotFound

if TYPE_CHECKING:
    from agentenv.config import Settings
    from agentenv.records.database import Database
    from agentenv.snapshot.records import Init

WATCH_EVERY_S = 0.5
COLUMNS: tuple[Column, ...] = (
    ("name", lambda row: row["names"][0]),
    ("id", lambda row: row["templateID"]),
    ("status", lambda row: row["buildStatus"]),
    ("cpus", lambda row: row["cpuCount"]),
    ("mib", lambda row: row["memoryMB"]),
    ("disk", lambda row: row["diskSizeMB"]),
    ("published", lambda row: "yes" if row["public"] else "no"),
)


@click.group("template")
def command() -> None:
    """Make, list, tag, publish, export and delete templates."""


@command.command("create")
@click.argument("name")
@click.option("--from", "source", required=True, metavar="SOURCE", help="What it is made from; see below.")
@click.option("--vcpus", type=click.IntRange(min=1), help="Virtual cpus (1).")
@click.option("--memory", type=click.IntRange(min=128), metavar="MIB", help="Memory in MiB (512).")
@click.option("--disk", type=click.IntRange(min=64), metavar="MIB", help="Root disk in MiB (2048).")
@init_option
@click.option("--force", is_flag=True, help="Make it anew even if it is up to date.")
@credential_options
@quiet_option
@home_option
def create(
    name: str,
    source: str,
    vcpus: int | None,
    memory: int | None,
    disk: int | None,
    init: Init | None,
    force: bool,
    username: str | None,
    password_stdin: bool,
    quiet: bool,
    home: Path | None,
) -> None:
    """Make the template NAME from SOURCE, in the place of one of that name.

    \b
    SOURCE is one of
      IMAGE                      an image of a registry, such as python:3.13 or
                                 ghcr.io/owner/name:tag; docker:IMAGE where a path
                                 of that name exists
      debootstrap:SUITE          a small system from the distribution's mirror, made for agents
      DIRECTORY[:TAG|@DIGEST]    an OCI image layout
      FILE.tar[.gz|.zst]         what `docker save` or `podman save` wrote
      FILE.tar[.gz|.xz|.zst|…]   a root filesystem
      DIRECTORY                  a root filesystem

    \b
    Examples:
      aenv template create base --from debootstrap:bookworm
      aenv template create alpine --from alpine:3.22
      docker save python:3.13 | zstd > python.tar.zst; aenv template create python --from ./python.tar.zst
    """
    import asyncio

    from agentenv import config

    settings = config.load(home=home)
    require_root(settings)
    from agentenv.records.ledger import Ledger
    from agentenv.template.create import create as make
    from agentenv.template.create import reap

    with _database(settings) as database, Steps(quiet=quiet) as steps:
        ledger = Ledger(database)
        reap(ledger, database)  # what a killed build left takes a gigabyte
        template = asyncio.run(
            make(
                settings,
                database,
                ledger,
                name,
                source,
                vcpus=vcpus,
                memory_mib=memory,
                disk_mib=disk,
                force=force,
                init=init,
                credentials=credentials(username, password_stdin),
                progress=steps,
            )
        )
    click.echo(f"{template.name} {template.id}")


@command.command("list")
@form_option
@click.option("--names", is_flag=True, help="Only the names, a line each.")
@node_options
def list_templates(
    form: str | None, names: bool, url: str | None, api_key: str | None, home: Path | None
) -> None:
    """List the templates of a node, running or not, or of a server elsewhere.

    \b
    Examples:
      aenv template list
      aenv template list --output json | jq -r '.[].buildStatus'
    """
    node = remote(url, api_key, home)
    found: list[Row] = _kept(home) if node is None else node.call("GET", "/templates")
    if names:
        for each in found:
            click.echo(each["names"][0])
        return
    chosen = form_of(form)
    show(found, COLUMNS, chosen, key="templateID")
    if not found and chosen == "table":
        click.echo("make one: aenv template create base --from debootstrap:SUITE", err=True)


def _kept(home: Path | None) -> list[Row]:
    """What a data directory here has, as its node would answer."""
    from agentenv import config

    settings = config.load(home=home)
    if not settings.database.exists():  # a directory nobody has used yet stays as it is
        return []
    from agentenv.api.template_answers import fields
    from agentenv.template.store import Templates

    with _database(settings) as database:
        return [fields(each, settings) for each in Templates(database, settings).all()]


@command.command("delete")
@click.argument("names", nargs=-1, required=True, type=TEMPLATE, metavar="NAME...")
@node_options
def delete(names: tuple[str, ...], url: str | None, api_key: str | None, home: Path | None) -> None:
    """Delete templates, by name or id. One that sandboxes use is refused.

    \b
    Examples:
      aenv template delete app
    """
    if (node := remote(url, api_key, home)) is not None:
        for_each(names, lambda name: _delete(node, name), "deleting")
        return
    from agentenv import config

    settings = config.load(home=home)
    require_root(settings)
    from agentenv.template.store import Templates

    with _database(settings) as database:
        templates = Templates(database, settings)
        for_each(names, lambda name: templates.delete(name).id, "deleting", at_once=1)


def _delete(node: Node, name: str) -> str:
    found = template_of(node, name)
    node.call("DELETE", f"/templates/{found}")
    return found


@command.command("export")
@click.argument("name", type=TEMPLATE)
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Where to (NAME.tar here); - is standard output.",
)
@quiet_option
@node_options
def export(
    name: str, file: Path | None, quiet: bool, url: str | None, api_key: str | None, home: Path | None
) -> None:
    """Write the root filesystem of the template NAME[:TAG] to an OCI archive, which skopeo, podman and others
    read, and `aenv template create --from` as well.

    \b
    Examples:
      aenv template export app -o app.tar
      aenv template export app -o - | skopeo copy oci-archive:/dev/stdin docker://ghcr.io/owner/app
    """
    from agentenv.cli.exporting import export as fetch
    from agentenv.cli.exporting import file_of

    url, api_key = node_address(url, api_key, home)
    written = fetch(url, api_key, name, file or file_of(name), quiet=quiet)
    if not quiet:
        click.echo(f"{name} {written >> 20} MiB", err=True)


@command.command("show")
@click.argument("name", type=TEMPLATE)
@form_option
@node_option
def show_(node: Node, name: str, form: str | None) -> None:
    """Show the template NAME with its builds.

    \b
    Examples:
      aenv template show app
    """
    found = node.call("GET", f"/templates/{template_of(node, name)}")
    show_one(found, form_of(form), key="templateID")


@command.command("tag")
@click.argument("target", type=TEMPLATE, metavar="NAME[:TAG]")
@click.argument("tags", nargs=-1, required=True, metavar="NEW...")
@click.option("--remove", is_flag=True, help="Take these tags away from NAME instead.")
@node_option
def tag(node: Node, target: str, tags: tuple[str, ...], remove: bool) -> None:
    """Have the tags NEW point to the build that NAME[:TAG] means now.

    \b
    Examples:
      aenv template tag app stable v3
      aenv template tag app v2 --remove
    """
    if remove:
        node.call("DELETE", "/templates/tags", {"name": target, "tags": list(tags)})
    else:
        click.echo(node.call("POST", "/templates/tags", {"target": target, "tags": list(tags)})["buildID"])


@command.command("publish")
@click.argument("name", type=TEMPLATE)
@click.option("--undo", is_flag=True, help="Let its own project use it alone again.")
@node_option
def publish(node: Node, name: str, undo: bool) -> None:
    """Let all projects of the node use the template NAME.

    \b
    Examples:
      aenv template publish app
      aenv template publish app --undo
    """
    found = node.call("PATCH", f"/v2/templates/{template_of(node, name)}", {"public": not undo})
    click.echo(" ".join(found["names"]))


@command.command("watch")
@click.argument("name", type=TEMPLATE)
@node_option
def watch(node: Node, name: str) -> None:
    """Follow the newest build of the template NAME until it ends; ends with 1 if it fails.

    \b
    Examples:
      aenv build . --name app --detach && aenv template watch app
    """
    import time

    found = node.call("GET", f"/templates/{template_of(node, name)}")
    if not found["builds"]:
        raise NotFound(f"the template {name} has no build")
    path = f"/templates/{found['templateID']}/builds/{found['builds'][0]['buildID']}/status"
    offset = 0
    while True:
        status = node.call("GET", f"{path}?logsOffset={offset}")
        for entry in status["logEntries"]:
            click.echo(f"[{entry['level']}] {entry['message']}")
        offset += len(status["logEntries"])
        if status["status"] not in ("waiting", "building"):
            break
        time.sleep(WATCH_EVERY_S)  # the API of builds has no stream
    click.echo(status["status"], err=True)
    if status["status"] != "ready":
        reason = status.get("reason") or {}
        raise AenvError(reason.get("message") or f"the build ended as {status['status']}")


@contextmanager
def _database(settings: Settings) -> Iterator[Database]:
    from agentenv.records.database import Database

    database = Database(settings.database)
    try:
        yield database
    finally:
        database.close()
