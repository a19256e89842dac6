"""`aenv doctor`: what this host can do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentenv.cli.options import home_option
from agentenv.cli.output import Form, form_of, form_option
from agentenv.cli.root import rather_as_root

if TYPE_CHECKING:
    from agentenv.host.capability import Capability


@click.command("doctor")
@form_option
@home_option
def command(home: Path | None, form: str | None) -> None:
    """List every capability with ok, missing or degraded, why it matters and how to get it.

    Exit code 0 when a node can run here, 6 when something required is missing. A user who may use
    sudo is told what root can do, since a node runs as root.

    \b
    Examples:
      aenv doctor
      aenv doctor --output json | jq '.capabilities[] | select(.status != "ok")'
    """
    from agentenv import config

    settings = config.load(home=home)
    rather_as_root(settings)
    from agentenv.host import doctor

    capabilities = doctor.run(settings)
    click.echo(_shown(capabilities, form_of(form)))
    sys.exit(0 if doctor.able(capabilities) else 6)


def _shown(capabilities: Sequence[Capability], form: Form) -> str:
    from agentenv.host import doctor

    if form == "json":
        return doctor.as_json(capabilities)
    if form == "ids":
        return "\n".join(each.name for each in capabilities)
    return doctor.as_table(capabilities)
