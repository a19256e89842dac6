"""`aenv node`: a node in the background."""

from __future__ import annotations

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
from agentenv.cli.meter import waiting
from agentenv.cli.options import address_options, home_option
from agentenv.cli.output import form_of, form_option, show_one
from agentenv.cli.root import require_root
from agentenv.errors import Conflict, HostFault, OutcomeUnknown

if TYPE_CHECKING:
    from agentenv.config import Settings
    from agentenv.host.service import Service, Verb
    from agentenv.run_record import RunRecord

START_LIMIT_S = 90.0
STOP_LIMIT_S = 60.0
_OF_THE_DIRECTORY = {"home", "runtime", "docker_config"}  # which sudo is given, and which service is meant


@click.group("node")
def command() -> None:
    """Start, stop, restart or look at a node in the background.

    Where scripts/install made the service agentenv.service of the data directory, systemd is asked to do it.
    """


@command.command("start")
@home_option
@address_options
def start(home: Path | None, host: str | None, port: int | None) -> None:
    """Start a node in the background; says so when one already runs.

    \b
    Examples:
      aenv node start
      AENV_MAX_SANDBOXES=50 aenv node start --port 8080
    """
    from agentenv import config, run_record
    from agentenv.host import service

    settings = config.load(home=home, host=host, port=port)
    require_root(settings)
    running = run_record.read(settings)
    if running:
        click.echo(f"already running: {running.url} (process {running.pid})")
        return
    owner = service.of(settings)
    if owner is not None:
        by_systemd(settings, "start", host, port)
        return
    launch(settings)


@command.command("stop")
@home_option
@click.option("--keep", is_flag=True, help="Leave the sandboxes running; the next start adopts them.")
def stop(home: Path | None, keep: bool) -> None:
    """Stop the node and, unless --keep is given, pause its sandboxes first.

    \b
    Examples:
      aenv node stop
      aenv node stop --keep
    """
    from agentenv import config, run_record
    from agentenv.host import service

    settings = config.load(home=home)
    require_root(settings)
    running = run_record.read(settings)
    if running is None:
        click.echo(f"no node runs on {settings.home}")
        return
    if not keep:
        with waiting("pausing the sandboxes"):
            paused = LocalNode(running.url, api_key(settings)).pause_all()
        click.echo(f"paused {paused} sandbox{'' if paused == 1 else 'es'}")
    if runs_as(service.of(settings), running):
        service.ask("stop")
    else:
        terminate(running)
    click.echo(f"stopped {running.url}")


@command.command("restart")
@home_option
@address_options
def restart(home: Path | None, host: str | None, port: int | None) -> None:
    """Stop the node, leaving its sandboxes, and start it again; it adopts them.

    \b
    Examples:
      aenv node restart
    """
    from agentenv import config, run_record
    from agentenv.host import service

    settings = config.load(home=home, host=host, port=port)
    require_root(settings)
    running = run_record.read(settings)
    owner = service.of(settings)
    if owner is not None and (running is None or runs_as(owner, running)):
        by_systemd(settings, "restart", host, port)
        return
    if running is not None:
        terminate(running)
        if port is None and host is None:  # the same address again, whatever was asked at the first start
            settings = config.load(home=home, host=running.host, port=running.port)
    launch(settings)


@command.command("status")
@form_option
@home_option
def status(home: Path | None, form: str | None) -> None:
    """Say whether a node runs, where, and with how many sandboxes. Exit code 3 when none runs.

    \b
    Examples:
      aenv node status
      aenv node status --output json | jq -r .url
    """
    from agentenv import config, run_record
    from agentenv.host import service

    settings = config.load(home=home)
    running = run_record.read(settings)
    owner = service.of(settings)
    if running is None:
        facts: dict[str, object] = {"running": False, "home": str(settings.home)}
        if owner is not None:
            facts |= {"service": str(owner), "log": service.LOG}
    else:
        facts = {
            "running": True,
            "url": running.url,
            "pid": running.pid,
            "home": str(settings.home),
            "service": str(owner) if runs_as(owner, running) else None,
            "log": service.LOG if runs_as(owner, running) else str(settings.log_file),
        }
        if os.access(settings.api_key_file, os.R_OK):
            facts["sandboxes"] = LocalNode(running.url, api_key(settings)).count()
    show_one(facts, form_of(form), key="home")
    sys.exit(0 if running else 3)


def runs_as(owner: Service | None, running: RunRecord) -> bool:
    """Whether that node is the service's process, and systemd can be asked to do something with it."""
    return owner is not None and owner.pid == running.pid and not owner.is_ending


def by_systemd(settings: Settings, verb: Verb, host: str | None, port: int | None) -> None:
    """Have the service started or started anew, and say where it serves.

    Raises:
        Conflict: another address is asked for than the service's settings have. HostFault, OutcomeUnknown: it
            did not come up.
    """
    from agentenv import run_record
    from agentenv.host import service

    if host is not None or port is not None:
        raise Conflict(
            f"{service.UNIT} serves {settings.home}, at the address that its settings name",
            remedy=f"AENV_HOST and AENV_PORT in {service.DEFAULTS}, or --home of another data directory",
        )
    if unheard := _of_this_shell(settings):
        click.echo(f"{', '.join(unheard)}: not for {service.UNIT}, which reads {service.DEFAULTS}", err=True)
    with waiting(f"waiting for {service.UNIT}"):
        service.ask(verb)
    running = run_record.read(settings)
    if running is None:
        raise HostFault(f"{service.UNIT} was started and does not serve", remedy=f"see {service.LOG}")
    click.echo(f"serving: {running.url} (process {running.pid}, {service.UNIT}; its log: {service.LOG})")


def _of_this_shell(settings: Settings) -> list[str]:
    """The variables with settings that this process has and a service does not get."""
    known = {f"AENV_{name.upper()}" for name in set(type(settings).model_fields) - _OF_THE_DIRECTORY}
    return sorted(known & set(os.environ))


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
        with waiting("starting the node"):
            serves = select.select([pipe], [], [], START_LIMIT_S)[0]
        if not serves:
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
        with waiting("stopping the node"):
            ended = select.select([pidfd], [], [], STOP_LIMIT_S)[0]
        if not ended:
            raise OutcomeUnknown(
                f"process {running.pid} still runs {STOP_LIMIT_S:.0f} s after it was asked to end",
                remedy="look at the node's log",
            )
    finally:
        os.close(pidfd)
