"""`aenv doctor`: what this host can do."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from agentenv.cli.options import home_option, output_option
from agentenv.cli.root import rather_as_root


@click.command("doctor")
@home_option
@output_option
def command(home: Path | None, output: str) -> None:
    """List every capability with ok, missing or degraded, why it matters and how to get it.

    Exit code 0 when a node can run here, 6 when something required is missing. A user who may use
    sudo is told what root can do, since a node runs as root.
    """
    from agentenv import config

    settings = config.load(home=home)
    rather_as_root(settings)
    from agentenv.host import doctor

    capabilities = doctor.run(settings)
    click.echo(doctor.as_json(capabilities) if output == "json" else doctor.as_table(capabilities))
    sys.exit(0 if doctor.able(capabilities) else 6)
