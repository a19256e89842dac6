"""`aenv connect`: a shell in a sandbox, with this terminal."""

from __future__ import annotations

import sys
from operator import itemgetter
from typing import TYPE_CHECKING

import click

from agentenv.cli.attached.door import Door
from agentenv.cli.attached.options import Attaching, attaching_options
from agentenv.cli.completing import SANDBOX
from agentenv.cli.naming import sandbox_of
from agentenv.cli.output import Column, form_of, form_option, show

if TYPE_CHECKING:
    from agentenv.cli.attached.processes import Ended
    from agentenv.cli.attached.session import Left

SHELLS: tuple[Column, ...] = (("shell", itemgetter("shell")), ("pid", itemgetter("pid")))


@click.command("connect")
@click.argument("sandbox", type=SANDBOX)
@click.option("--new", is_flag=True, help="A new shell, even if one was left here.")
@click.option("--shell", "tag", metavar="TAG", help="That shell, wherever it was left.")
@click.option("--list", "only_list", is_flag=True, help="List the shells that run, and attach to none.")
@form_option
@attaching_options
def command(
    asked: Attaching,
    sandbox: str,
    new: bool,
    tag: str | None,
    only_list: bool,
    form: str | None,
) -> None:
    """Open a shell in SANDBOX, or go back to the one that was left there; a paused sandbox is resumed.

    Ctrl-P Ctrl-Q leaves the shell, which goes on. While somebody is attached the sandbox's time does not run
    out. When it is paused meanwhile, any key resumes it, and the shell goes on where it was.

    \b
    Examples:
      aenv connect isx3k2v9
      aenv connect --new --user root isx3k2v9
      aenv connect --detach-keys ctrl-] isx3k2v9
      aenv connect --list isx3k2v9
    """
    from agentenv.cli.attached.shell import Wanted, attach, listed

    if form and not only_list:
        raise click.UsageError("--output is the form of what --list lists")
    node = asked.node()
    door = Door(node, sandbox_of(node, sandbox))
    if only_list:
        found = [{"shell": each, "pid": pid} for each, pid in listed(door).items()]
        show(found, SHELLS, form_of(form), key="shell")
        return
    outcome = attach(door, Wanted(asked.user, asked.cwd, asked.env, asked.keys, new, tag))
    tell_after(door, outcome)
    sys.exit(status_of(outcome))


def tell_after(door: Door, outcome: Ended | Left) -> None:
    """What goes on, and how to come back; for people alone."""
    from agentenv.cli.attached.session import Left

    if not sys.stderr.isatty():
        return
    what = "the shell was left and goes on" if isinstance(outcome, Left) else "the shell has ended"
    click.echo(f"[aenv: {what}; back to sandbox {door.id}: aenv connect {door.id}]", err=True)


def status_of(outcome: Ended | Left) -> int:
    """The status that the command ends with."""
    from agentenv.cli.attached.session import Left

    if isinstance(outcome, Left):
        return 128 + outcome.by if outcome.by else 0
    return outcome.code
