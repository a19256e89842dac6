"""`aenv node`: a node in the background."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentenv.cli.env import api_key
from agentenv.cli.local import LocalNode
from agentenv.cli.options import address_options, home_option, output_option
from agentenv.cli.root import require_root
from agentenv.errors import HostFault, OutcomeUnknown

if TYPE_CHECKING:
    from agentenv.config import Settings
    from agentenv.run_record import RunRecord

START_LIMIT_S = 90.0
STOP_LIMIT_S = 60.0


@click.group("node")
def command() -> None:
    """Start, stop, restart or look at a node in the background."""


@command.command("start")
@home_option
@address_options
def start(home: Path | None, host: str | None, port: int | None) -> None:
    """Start a node in the background; says so when one already runs."""
    from agentenv import config, run_record

    settings = config.load(home=home, host=host, port=port)
    require_root(settings)
    running = run_record.read(settings)
    if running:
        click.echo(f"already running: {running.url} (process {running.pid})")
        return
    launch(settings)


@command.command("stop")
@home_option
@click.option("--keep", is_flag=True, help="Leave the sandboxes running; the next start adopts them.")
def stop(home: Path | None, keep: bool) -> None:
    """Stop the node and, unless --keep is given, pause its sandboxes first."""
    from agentenv import config, run_record

    settings = config.load(home=home)
    require_root(settings)
    running = run_record.read(settings)
    if running is None:
        click.echo(f"no node runs on {settings.home}")
        return
    if not keep:
        paused = LocalNode(running.url, api_key(settings)).pause_all()
        click.echo(f"paused {paused} sandbox{'' if paused == 1 else 'es'}")
    terminate(running)
    click.echo(f"stopped {running.url}")


@command.command("restart")
@home_option
@address_options
def restart(home: Path | None, host: str | None, port: int | None) -> None:
    """Stop the node, leaving its sandboxes, and start it again; it adopts them."""
    from agentenv import config, run_record

    settings = config.load(home=home, host=host, port=port)
    require_root(settings)
    running = run_record.read(settings)
    if running is not None:
        terminate(running)
        if port is None and host is None:  # the same address again, whatever was asked at the first start
            settings = config.load(home=home, host=running.host, port=running.port)
    launch(settings)


@command.command("status")
@home_option
@output_option
def status(home: Path | None, output: str) -> None:
    """Say whether a node runs, where, and with how many sandboxes. Exit code 3 when none runs."""
    from agentenv import config, run_record

    settings = config.load(home=home)
    running = run_record.read(settings)
    if running is None:
        facts: dict[str, object] = {"running": False, "home": str(settings.home)}
    else:
        facts = {
            "running": True,
            "url": running.url,
            "pid": running.pid,
            "home": str(settings.home),
            "log": str(settings.log_file),
        }
        if os.access(settings.api_key_file, os.R_OK):
            facts["sandboxes"] = LocalNode(running.url, api_key(settings)).count()
    if output == "json":
        click.echo(json.dumps(facts))
    else:
        click.echo("\n".join(f"{name:10} {value}" for name, value in facts.items()))
    sys.exit(0 if running else 3)


def launch(settings: Settings) -> None:
    """Start `aenv serve` detached, its output in the node's log, and wait until it serves.

    Raises:
        HostFault: it ended before it served; the message has the end of its log.
        OutcomeUnknown: it neither served nor ended in time.
    """
    settings.home.mkdir(mode=0o755, parents=True, exist_ok=True)
    ready, theirs = os.pipe()
    arguments = ["serve", "--home", str(settings.home), "--host", settings.host, "--port", str(settings.port)]
    with settings.log_file.open("ab") as log, os.fdopen(ready, "rb") as pipe:
        begun = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "agentenv", *arguments, "--ready-fd", str(theirs)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(theirs,),
            cwd="/",
        )
        os.close(theirs)
        if not select.select([pipe], [], [], START_LIMIT_S)[0]:
            raise OutcomeUnknown(
                f"the node did not serve within {START_LIMIT_S:.0f} s", remedy=f"look at {settings.log_file}"
            )
        url = pipe.readline().decode().strip()
    if not url:
        status = process.wait()
        tail = settings.log_file.read_bytes()[begun:].decode(errors="replace").strip()[-2000:]
        raise HostFault(f"the node ended at its start (status {status}):\n{tail}", remedy="aenv doctor")
    click.echo(f"serving: {url} (process {process.pid}, log {settings.log_file})")


def terminate(running: RunRecord) -> None:
    """Ask that process to end and wait until it has.

    Raises:
        OutcomeUnknown: it still runs after a minute.
    """
    try:
        pidfd = os.pidfd_open(running.pid)
    except ProcessLookupError:
        return
    try:
        if not running.alive:  # the number was reused before the descriptor was there
            return
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not select.select([pidfd], [], [], STOP_LIMIT_S)[0]:
            raise OutcomeUnknown(
                f"process {running.pid} still runs {STOP_LIMIT_S:.0f} s after it was asked to end",
                remedy="look at the node's log",
            )
    finally:
        os.close(pidfd)
