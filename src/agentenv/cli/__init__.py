"""The aenv command: one module per command, imported only when it is called."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, NoReturn

import click

from agentenv import __version__
from agentenv.cli.telling import show_error
from agentenv.errors import AenvError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

INTERRUPTED = 130  # as shells have it for SIGINT

# Command -> (module, or module:name where the name is not `command`; one line for the overview). A module is
# imported when its command runs, so that `--help` and `--version` stay quick.
COMMANDS = {
    "auth": ("agentenv.cli.auth", "Know several servers by name, each with its key."),
    "build": ("agentenv.cli.build", "Build a template from a Dockerfile."),
    "completion": ("agentenv.cli.completion", "Print the completion script of a shell."),
    "config": ("agentenv.cli.shown_config", "Look at the settings of a node on this machine."),
    "connect": ("agentenv.cli.connect", "Open a shell in a sandbox, or go back to one that was left."),
    "cp": ("agentenv.cli.copying:cp", "Copy files between here and sandboxes."),
    "delete": ("agentenv.cli.sandboxes:delete", "End sandboxes."),
    "doctor": ("agentenv.cli.doctor", "List what this host can do, what it lacks and how to get it."),
    "download": ("agentenv.cli.copying:download", "Copy files out of a sandbox."),
    "env": ("agentenv.cli.env", "Print the variables that point E2B clients at the local node."),
    "events": ("agentenv.cli.looking:events", "Follow what happens on a node."),
    "exec": ("agentenv.cli.exec", "Run a command in a sandbox."),
    "fork": ("agentenv.cli.snapshots:fork", "Start sandboxes that go on from where one is."),
    "forward": ("agentenv.cli.forward", "Reach ports of a sandbox through ports here."),
    "fsck": ("agentenv.cli.fsck", "Check the records of a data directory against its files."),
    "key": ("agentenv.cli.key", "Make, list, rotate and revoke API keys, as an admin."),
    "limits": ("agentenv.cli.rules:limits", "Look at and replace how fast sandboxes may be."),
    "list": ("agentenv.cli.sandboxes:list_", "List sandboxes."),
    "logs": ("agentenv.cli.logs", "Show the log of a sandbox."),
    "metrics": ("agentenv.cli.looking:metrics", "Show what a sandbox took lately."),
    "network": ("agentenv.cli.rules:network", "Look at and replace what sandboxes may reach."),
    "node": ("agentenv.cli.node", "Start, stop, restart or look at a node in the background."),
    "operations": ("agentenv.cli.looking:operations", "Show what operations spent their time on."),
    "pause": ("agentenv.cli.sandboxes:pause", "Pause sandboxes."),
    "pull": ("agentenv.cli.pull", "Fetch and convert an image, so that templates of it are made at once."),
    "resume": ("agentenv.cli.sandboxes:resume", "Have paused sandboxes run again."),
    "rollback": ("agentenv.cli.snapshots:rollback", "Put a sandbox back to one of its snapshots."),
    "serve": ("agentenv.cli.serve", "Run a node in the foreground."),
    "setup": ("agentenv.cli.setup", "Prepare the data directory: guest kernel, initramfs, tools drive."),
    "show": ("agentenv.cli.sandboxes:show_", "Show all about a sandbox."),
    "snapshot": ("agentenv.cli.snapshots", "Take, list, look at and delete snapshots of sandboxes."),
    "start": ("agentenv.cli.start", "Make a sandbox and open a shell in it."),
    "template": ("agentenv.cli.template", "Make, list, tag, publish, export and delete templates."),
    "timeout": ("agentenv.cli.sandboxes:timeout", "Have a sandbox live so long from now."),
    "upload": ("agentenv.cli.copying:upload", "Copy files into a sandbox."),
    "version": ("agentenv.cli.version", "Print the version of this program, and of the node that is meant."),
}
# What people type who come from other tools.
ALIASES = {"kill": "delete", "ls": "list", "ps": "list", "rm": "delete", "unpause": "resume"}


class LazyGroup(click.Group):
    """A group whose commands are loaded by name and whose overview loads none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute or "command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See `click.Group`; what is no command is told with those that are spelled like it."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as mistake:
            from difflib import get_close_matches

            near = get_close_matches(args[0], [*COMMANDS, *ALIASES])
            if not near:
                raise
            raise click.UsageError(f"{mistake.message} Did you mean {' or '.join(near)}?", ctx) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names from the table above, so that no command's module is imported for them."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=summary)
            for name, (_, summary) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])
        with formatter.section("Also"):
            formatter.write_dl(list(ALIASES.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="aenv")
def cli() -> None:
    """MicroVM sandboxes for agents: use them, and run a node on this machine.

    SANDBOX is an id, the beginning of one, or the name that it was started with.

    \b
    Examples:
      aenv doctor
      aenv setup && aenv template create base --from debootstrap:bookworm
      aenv node start && eval "$(aenv env)"
      aenv start base
    """


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; errors of ours end it with one line on stderr and their exit code.

    Exit codes: 0 done, 1 failed, 2 usage or invalid request, 3 not found, 4 conflict, 5 capacity,
    6 the host lacks something, 7 not allowed, 8 the server does not answer, 9 it took too long,
    130 interrupted.
    """
    try:
        ended = cli.main(arguments, prog_name="aenv", standalone_mode=False)
        sys.exit(ended if isinstance(ended, int) else 0)
    except click.ClickException as mistake:
        mistake.show()
        sys.exit(mistake.exit_code)
    except click.Abort as aborted:
        by_signal = isinstance(aborted.__cause__ or aborted.__context__, KeyboardInterrupt)
        told = "interrupted" if by_signal else "not confirmed, so nothing was done\n  try: --yes"
        click.echo(f"aenv: {told}", err=True)
        sys.exit(INTERRUPTED if by_signal else 1)
    except AenvError as error:
        failed = error
    except ModuleNotFoundError as error:
        from agentenv.cli.extras import lacking

        if (lacks := lacking(error)) is None:
            raise
        failed = lacks
    show_error(failed)
    sys.exit(failed.exit_code)
