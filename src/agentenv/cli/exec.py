"""`aenv exec`: a command in a sandbox."""

from __future__ import annotations

import os
import stat
import sys

import click

from agentenv.cli.attached.door import Door
from agentenv.cli.attached.options import Attaching, attaching_options
from agentenv.cli.completing import SANDBOX
from agentenv.cli.naming import sandbox_of


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.argument("sandbox", type=SANDBOX)
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
@click.option(
    "--interactive", "-i", is_flag=True, help="Pass on what is typed; what is piped is passed on anyhow."
)
@click.option("--no-stdin", "-n", is_flag=True, help="Pass on nothing, although something is piped.")
@click.option("--tty", "-t", is_flag=True, help="Give it a terminal.")
@click.option(
    "--timeout", type=float, metavar="SECONDS", help="Kill it after so long (it may take any time)."
)
@click.option("--detach", "-d", is_flag=True, help="Start it and print its pid alone.")
@attaching_options
def command(
    asked: Attaching,
    sandbox: str,
    words: tuple[str, ...],
    interactive: bool,
    no_stdin: bool,
    tty: bool,
    timeout: float | None,
    detach: bool,
) -> None:
    """Run COMMAND in SANDBOX, and end with its status; options come before SANDBOX.

    Words are the program and its arguments, without a shell; one word with spaces in it is for a login shell.
    Signals are passed on; the third Ctrl-C kills it. 127: there is no such program; 126: it cannot be run.

    \b
    Examples:
      aenv exec isx3k2v9 ls -l /srv
      aenv exec --user root isx3k2v9 'apt-get update && apt-get install -y jq'
      tar c . | aenv exec isx3k2v9 tar x -C /srv
      aenv exec -it isx3k2v9 vi notes
    """
    from agentenv.cli.attached.execution import Execution

    if words[0] == "--":  # which click takes for a word, since no options follow SANDBOX
        words = words[1:]
    if not words:
        raise click.UsageError("give a command after --")
    wanted = Execution(
        words=words
        if len(words) > 1 or not any(map(str.isspace, words[0]))
        else ("/bin/bash", "-l", "-c", *words),
        user=asked.user,
        cwd=asked.cwd,
        env=asked.env,
        stdin=not no_stdin and not detach and (interactive or _is_piped()),
        tty=tty,
        timeout_s=timeout,
        keys=asked.keys,
    )
    node = asked.node()
    door = Door(node, sandbox_of(node, sandbox))
    if detach:
        click.echo(wanted.begin(door))
        return
    sys.exit(wanted.run(door))


def _is_piped() -> bool:
    """Whether something stands at standard input that is no terminal and no device."""
    try:
        kind = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)
