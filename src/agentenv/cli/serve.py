"""`aenv serve`: a node in the foreground."""

from __future__ import annotations

from pathlib import Path

import click

from agentenv.cli.options import address_options, home_option
from agentenv.cli.root import require_root


@click.command("serve")
@home_option
@address_options
@click.option("--ready-fd", type=int, hidden=True, help="Descriptor to write a line to once the node serves.")
def command(home: Path | None, host: str | None, port: int | None, ready_fd: int | None) -> None:
    """Run a node in the foreground, with its log on stderr.

    SIGINT or SIGTERM end the node and leave its sandboxes running: the next start adopts them.

    \b
    Examples:
      aenv serve
      AENV_LOG_FORMAT=json aenv serve --host 0.0.0.0 --port 8080
    """
    from agentenv import config

    settings = config.load(home=home, host=host, port=port)
    require_root(settings)
    from agentenv.node import serve

    serve(settings, ready_fd=ready_fd)
