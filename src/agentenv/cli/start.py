"""`aenv start`: a new sandbox, and a shell in it."""

from __future__ import annotations

import sys
from typing import Any

import click

from agentenv.cli.assignments import pairs
from agentenv.cli.attached.door import Door
from agentenv.cli.attached.options import Attaching, attaching_options
from agentenv.cli.completing import TEMPLATE
from agentenv.cli.meter import waiting


@click.command("start")
@click.argument("template", required=False, type=TEMPLATE)
@click.option("--cold", "image", metavar="IMAGE", help="Of an image, in the place of a template.")
@click.option("--detach", "-d", is_flag=True, help="Print its id, and nothing else; attach nothing.")
@click.option("--rm", "remove", is_flag=True, help="Delete it when the shell ends.")
@click.option("--name", metavar="NAME", help="A name for it, by which commands find it.")
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Something to find it by.")
@click.option("--timeout", type=click.IntRange(min=1), metavar="SECONDS", help="How long it lives (300).")
@click.option("--cpu", type=click.IntRange(min=1), metavar="N", help="Virtual processors (the template's).")
@click.option("--memory", type=click.IntRange(min=1), metavar="MIB", help="Memory (the template's).")
@click.option("--disk", type=click.IntRange(min=1), metavar="MIB", help="Root disk (the template's).")
@click.option(
    "--drive", "drives", multiple=True, metavar="IMAGE[:PATH][:rw]", help="An image beside the root disk."
)
@click.option("--no-internet", is_flag=True, help="It reaches nothing outside.")
@click.option(
    "--allow", multiple=True, metavar="WHERE", help="It reaches this alone: address, range or name."
)
@click.option("--deny", multiple=True, metavar="WHERE", help="It does not reach this: address or range.")
@click.option("--network", type=click.File("r"), metavar="FILE", help="`network` of the API, as JSON.")
@click.option("--private", is_flag=True, help="Its ports are open to who has its traffic token.")
@click.option("--secure/--no-secure", default=True, help="Its agent wants the access token (it does).")
@attaching_options
def command(
    attaching: Attaching,
    template: str | None,
    image: str | None,
    detach: bool,
    remove: bool,
    **asked: Any,
) -> None:
    """Make a sandbox of TEMPLATE, or of an image, and open a shell in it.

    The sandbox goes on when the shell ends, unless --rm says otherwise; variables are the sandbox's, for all
    that is run in it.

    \b
    Examples:
      aenv start base
      aenv start -d base --timeout 3600 --env TOKEN
      aenv start --cold python:3.13 --memory 1024 --allow pypi.org --allow files.pythonhosted.org
      aenv start base --drive registry.local/data:7:/srv/data --rm
    """
    from agentenv.cli.attached.creation import create

    if (template is None) == (image is None):
        raise click.UsageError("give a template, or an image with --cold IMAGE")
    node = attaching.node()
    asked["metadata"] = pairs(asked["metadata"], "--metadata")
    with waiting(f"starting {template or image}"):
        sandbox_id = create(node, template=template, image=image, env=attaching.env, **asked)
    if detach:
        click.echo(sandbox_id)
        return
    _attach(Door(node, sandbox_id), attaching, remove=remove)


def _attach(door: Door, asked: Attaching, *, remove: bool) -> None:
    from agentenv.cli.attached.processes import Ended
    from agentenv.cli.attached.shell import Wanted, attach
    from agentenv.cli.connect import status_of, tell_after

    outcome = None
    try:
        outcome = attach(door, Wanted(asked.user, asked.cwd, keys=asked.keys, new=True))
    finally:
        if remove and (outcome is None or isinstance(outcome, Ended)):
            door.delete()
    if not (remove and isinstance(outcome, Ended)):
        tell_after(door, outcome)
    sys.exit(status_of(outcome))
