"""Command lines as tables: how each ends, in the process of a test or as the program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from agentenv.cli import ALIASES, cli, main
from agentenv.cli.documents import SCHEMAS
from support.commands import leaves

Way = Literal["in-process", "program"]
WAYS: tuple[Way, ...] = ("in-process", "program")
COMMANDS = dict(leaves(cli))
LIMIT_S = 200.0


@dataclass(frozen=True)
class Step:
    """A command line and how it ends. {words} are what steps before `kept`, and what a test fills in."""

    line: str
    code: int = 0
    given: str = ""
    says: str | None = None
    """All that it prints."""
    told: str = ""
    """Part of what is on stderr."""
    keeps: str = ""
    """A name for what it prints."""
    within: Mapping[str, str] = field(default_factory=dict)
    """Variables of its environment."""

    @property
    def path(self) -> tuple[str, ...]:
        """The words that call it, by its own name."""
        words = self.line.split()
        words[0] = ALIASES.get(words[0], words[0])
        return next(tuple(words[:count]) for count in (2, 1) if tuple(words[:count]) in COMMANDS)

    @property
    def is_json(self) -> bool:
        """Whether it prints JSON: what makes a key prints that alone unless it is asked for more."""
        if self.code or self.path not in SCHEMAS or "--output ids" in self.line:
            return False
        return self.path[0] != "key" or self.path[1] == "list" or "--output json" in self.line

    def words(self, kept: Mapping[str, str]) -> list[str]:
        """As a shell splits them; $ is the guest's."""
        return [filled(word.strip("'"), kept) for word in re.findall(r"'[^']*'|\S+", self.line)]


def filled(text: str, kept: Mapping[str, str]) -> str:
    """The text with what is kept in the place of {words}."""
    return re.sub(r"\{(\w+)\}", lambda found: kept[found[1]], text)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    error: str


class Commands:
    """Runs steps for a user.

    Args:
        environment: all of the user's variables.
        directory: for files of its own.
        patch: undone after each command.
        captured: what this process prints.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        directory: Path,
        patch: pytest.MonkeyPatch,
        captured: pytest.CaptureFixture[bytes],
    ) -> None:
        self._environment = environment
        self._given = directory / "given"
        self._patch, self._captured = patch, captured

    def run(self, step: Step, way: Way, kept: Mapping[str, str]) -> Done:
        """Run one to its end; no traceback is told."""
        within = {name: filled(value, kept) for name, value in step.within.items()}
        environment = {**self._environment, **within}
        run = self._as_program if way == "program" else self._in_process
        done = run(step.words(kept), filled(step.given, kept).encode(), environment)
        assert "Traceback" not in done.error, (step.line, done.error)
        return done

    def _as_program(self, words: list[str], given: bytes, environment: Mapping[str, str]) -> Done:
        command = [sys.executable, "-m", "agentenv", *words]
        done = subprocess.run(command, env=environment, input=given, capture_output=True, timeout=LIMIT_S)
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def _in_process(self, words: list[str], given: bytes, environment: Mapping[str, str]) -> Done:
        self._given.write_bytes(given)
        with self._given.open() as stdin, self._patch.context() as patch, at_0(stdin.fileno()):
            patch.setattr(sys, "stdin", stdin)
            for name in os.environ.keys() - environment.keys():
                patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main(words)
            sys.stdout.flush()
        out, error = self._captured.readouterr()
        return Done(int(ended.value.code or 0), out.decode(), error.decode())


@contextmanager
def at_0(descriptor: int) -> Iterator[None]:
    """Have it as standard input, for what reads no object but the descriptor."""
    before = os.dup(0)
    os.dup2(descriptor, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)
