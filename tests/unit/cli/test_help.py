"""What --help says: examples of every command, which are commands that there are."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from agentenv.cli import COMMANDS, LazyGroup, cli
from support.commands import leaves

LEAVES = dict(leaves(cli))


def examples(command: click.Command) -> list[str]:
    """The lines below `Examples:` of a command's help."""
    lines = inspect.cleandoc(command.help or "").splitlines()
    if "Examples:" not in lines:
        return []
    return [line.strip() for line in lines[lines.index("Examples:") + 1 :] if line.startswith("  ")]


def calls(line: str) -> Iterator[list[str]]:
    """The words after `aenv` of each call in a line of a shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        for inner in re.findall(r"\$\((aenv .*)\)", word):  # within quotes
            yield from calls(inner)
        if re.fullmatch(r"[();<>|&]+", word):
            if "aenv" in words:
                yield words[words.index("aenv") + 1 :]
            words = []
        else:
            words.append(word)


def parse(words: list[str]) -> tuple[str, ...]:
    """The command that words call, once they were taken as they would be if it were run."""
    command: click.Command = cli
    path: list[str] = []
    parent: click.Context | None = None
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, words
        path.append(words[0])
        parent = click.Context(command, parent=parent)
        command, words = found, words[1:]
    command.make_context(path[-1], list(words), parent=parent)
    return tuple(path)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_a_command_has_examples_that_it_takes(
    path: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("Dockerfile", "rules.json"):
        (tmp_path / name).touch()
    shown = examples(LEAVES[path])
    assert shown, f"aenv {' '.join(path)} --help has no examples"
    called = [parse(words) for line in shown for words in calls(line)]
    assert path in called


def test_the_overview_says_what_the_commands_are() -> None:
    assert isinstance(cli, LazyGroup)
    for name, (_, summary) in COMMANDS.items():
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        says = command.get_short_help_str(limit=1000)
        if isinstance(command, click.Group):
            assert says == summary, name
        else:
            assert says.split()[0] == summary.split()[0], name
        assert summary.endswith("."), name
        assert len(summary) < 80, name
