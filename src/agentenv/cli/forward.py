"""`aenv forward`: ports of a sandbox, here."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from agentenv.cli.attached.door import Door
from agentenv.cli.completing import SANDBOX
from agentenv.cli.meant import node_address
from agentenv.cli.naming import sandbox_of
from agentenv.cli.options import node_options
from agentenv.cli.server import Node


@click.command("forward")
@click.argument("sandbox", type=SANDBOX)
@click.argument("ports", nargs=-1, required=True, metavar="[[BIND:]LOCAL:]REMOTE...")
@node_options
def command(
    sandbox: str,
    ports: tuple[str, ...],
    url: str | None,
    api_key: str | None,
    home: Path | None,
) -> None:
    """Reach ports of SANDBOX through ports here, until Ctrl-C.

    Each connection becomes one to the sandbox, byte for byte; services on its loopback address are reached
    too. Ports here are on 127.0.0.1 unless BIND says otherwise; LOCAL 0 is any free one. The addresses are
    printed when all are ready.

    \b
    Examples:
      aenv forward isx3k2v9 8080:80
      aenv forward isx3k2v9 5432 0:8000
      aenv forward isx3k2v9 0.0.0.0:8080:80
    """
    import asyncio

    from agentenv.cli.attached.forwarding import Forwarding, Pair, parse_pair

    wanted = [parse_pair(each) for each in ports]
    node = Node(*node_address(url, api_key, home))
    sandbox = sandbox_of(node, sandbox)
    way = Door(node, sandbox).way()

    def ready(pair: Pair, host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"{shown}:{port} -> {sandbox}:{pair.remote}")

    async def serve() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        forwarding = Forwarding(way, lambda message: click.echo(f"aenv: {message}", err=True))
        try:
            await forwarding.run(wanted, ready)
        except asyncio.CancelledError:
            pass  # asked to end, which is what this command ends by

    asyncio.run(serve())
