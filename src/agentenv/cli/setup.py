"""`aenv setup`: prepare the data directory."""

from __future__ import annotations

from pathlib import Path

import click

from agentenv.cli.options import home_option, quiet_option
from agentenv.cli.progress import Steps
from agentenv.cli.root import require_root


@click.command("setup")
@quiet_option
@home_option
@click.option(
    "--kernel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Guest kernel (bzImage) to use instead of the distribution's cloud kernel.",
)
@click.option(
    "--local-ca",
    is_flag=True,
    help="Make a certificate authority for the node's domain too, which then speaks https as well.",
)
def command(home: Path | None, kernel: Path | None, local_ca: bool, quiet: bool) -> None:
    """Prepare the data directory: guest kernel, initramfs, tools drive, KVM probe.

    Repeatable: what is already there and still right is left alone.

    \b
    Examples:
      aenv setup
      aenv setup --local-ca
    """
    from agentenv import config

    settings = config.load(home=home, kernel=kernel)
    require_root(settings)
    from agentenv.host.setup import setup

    setup(settings, Steps(quiet=quiet), local_ca=local_ca)
    if local_ca:
        from agentenv.tls import trust

        click.echo(trust.advice(settings))
