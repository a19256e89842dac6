"""`aenv completion`: the script by which a shell completes commands, options and choices."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    Examples:
      source <(aenv completion bash)                                  # in ~/.bashrc
      source <(aenv completion zsh)                                   # in ~/.zshrc, after compinit
      aenv completion fish > ~/.config/fish/completions/aenv.fish
    """
    from agentenv.cli import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "aenv", "_AENV_COMPLETE").source())
