"""`aenv fsck`: the data directory against its records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentenv.cli.options import home_option, quiet_option
from agentenv.cli.output import form_of, form_option
from agentenv.cli.progress import Steps
from agentenv.cli.root import require_root
from agentenv.errors import NotFound

if TYPE_CHECKING:
    from agentenv.checking import Finding


@click.command("fsck")
@click.option("--digests", is_flag=True, help="Read all files through: about a second for a GiB.")
@click.option("--repair", is_flag=True, help="Remove what belongs to nobody; refused while a node runs.")
@quiet_option
@form_option
@home_option
def command(digests: bool, repair: bool, quiet: bool, form: str | None, home: Path | None) -> None:
    """Check the data directory: records that cannot be read, files that are missing or have changed, and what
    belongs to no record.

    Nothing is changed without --repair, which only removes what no record names: a file that is missing does
    not come back. Ends with 1 if anything is wrong, with 0 if nothing is, or nothing any more.

    \b
    Examples:
      aenv fsck
      aenv fsck --digests --output json
      aenv node stop && aenv fsck --repair
    """
    from agentenv import config
    from agentenv.checking import examine, mend

    settings = config.load(home=home)
    if not settings.database.exists():
        raise NotFound(f"{settings.home} is no data directory of a node", remedy="--home, AENV_HOME")
    require_root(settings)
    with Steps(quiet=quiet) as steps:
        found = (mend if repair else examine)(settings, digests=digests, progress=steps)
    chosen = form_of(form)
    if chosen == "json":
        click.echo(json.dumps([each.document() for each in found], indent=2))
    elif chosen == "ids":
        for each in found:
            click.echo(each.path)
    else:
        _tell(found)
    sys.exit(1 if any(not each.repaired for each in found) else 0)


def _tell(found: tuple[Finding, ...]) -> None:
    for each in found:
        about = f" ({', '.join(each.concerns)})" if each.concerns else ""
        state = ": removed" if each.repaired else ""
        click.echo(f"{each.path} {each.what}{about}{state}")
    if not found:
        click.echo("all is as recorded", err=True)
    elif any(each.repairable and not each.repaired for each in found):
        click.echo("what belongs to nobody is removed by: aenv node stop && aenv fsck --repair", err=True)
