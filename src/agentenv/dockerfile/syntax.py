"""The text of a Dockerfile as instructions with flags, words and heredocs.

The grammar is BuildKit's, by the `e2b-dockerfile-utils` package, a port of its parser. This module gives its
results types of our own, so that nothing else here knows the package, and names the line in each error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from e2b_dockerfile_utils import (
    DockerfileHeredoc,
    DockerfileInstruction,
    DockerfileSyntaxError,
    chomp_heredoc_content,
    parse_dockerfile_ast,
    parse_heredoc,
)

from agentenv.errors import InvalidRequest


class DockerfileError(InvalidRequest):
    """A Dockerfile that cannot be built, with the line (from 1; 0 when it is about all of it)."""

    def __init__(self, line: int, message: str, *, remedy: str | None = None) -> None:
        super().__init__(f"line {line}: {message}" if line else message, remedy=remedy)
        self.line = line
        self.bare = message  # without the line


@dataclass(frozen=True)
class Heredoc:
    """The text between `<<NAME` and NAME; `expand` unless the name was quoted."""

    name: str
    content: str
    expand: bool


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: in capitals.
        words: its arguments; of ENV and LABEL, name, value and what stood between, in turn.
        json: whether the words were a JSON array (exec form).
        flags: what stood before the words, without the dashes.
        heredocs: in the order of their markers in the words.
        text: the instruction in one line, as written.
    """

    name: str
    line: int
    text: str
    words: tuple[str, ...]
    json: bool = False
    flags: tuple[str, ...] = ()
    heredocs: tuple[Heredoc, ...] = ()

    def fault(self, message: str, *, remedy: str | None = None) -> DockerfileError:
        """An error at this instruction."""
        return DockerfileError(self.line, f"{self.name}: {message}", remedy=remedy)


@dataclass(frozen=True)
class Document:
    """A whole Dockerfile; `escape` is the character of its `# escape=` directive."""

    instructions: tuple[Instruction, ...]
    escape: str
    warnings: tuple[tuple[int, str], ...]


def parse(text: str) -> Document:
    """Read a Dockerfile.

    Raises:
        DockerfileError: it is no Dockerfile; with the line.
    """
    try:
        tree = parse_dockerfile_ast(text)
    except DockerfileSyntaxError as error:
        line = error.line or 0
        raise DockerfileError(line, str(error).partition(": ")[2]) from None
    return Document(
        tuple(_instruction(each) for each in tree.instructions),
        tree.escape_token,
        tuple((warning.line, warning.message) for warning in tree.warnings),
    )


def _instruction(parsed: DockerfileInstruction) -> Instruction:
    return Instruction(
        name=parsed.name,
        line=parsed.start_line,
        text=parsed.original.strip(),
        words=tuple(parsed.args),
        json=parsed.json,
        flags=tuple(parsed.flags),
        heredocs=tuple(_heredoc(each) for each in parsed.heredocs),
    )


def _heredoc(parsed: DockerfileHeredoc) -> Heredoc:
    content = chomp_heredoc_content(parsed.content) if parsed.chomp else parsed.content
    return Heredoc(parsed.name, content, parsed.expand)


def heredoc_name(word: str) -> str | None:
    """The name that a word like `<<EOF` or `<<-"EOF"` begins a heredoc with, or None."""
    found = parse_heredoc(word)
    return found.name if found else None


FlagKind = Literal["text", "switch", "list"]
"""A flag with a value; one that is on, off (`=false`) or absent; one that may be repeated."""


@dataclass(frozen=True)
class Flags:
    """The flags of one instruction, by name."""

    values: Mapping[str, tuple[str, ...]]

    def text(self, name: str) -> str | None:
        """Its value, or None when it is not there."""
        found = self.values.get(name)
        return found[-1] if found else None

    def switch(self, name: str, *, default: bool = False) -> bool:
        """Whether it is on."""
        found = self.values.get(name)
        return default if found is None else found[-1] == "true"

    def __contains__(self, name: str) -> bool:
        return name in self.values


def flags_of(instruction: Instruction, kinds: Mapping[str, FlagKind]) -> Flags:
    """The instruction's flags, of which `kinds` names all that are known.

    Raises:
        DockerfileError: one is unknown, has no value or is given twice.
    """
    values: dict[str, tuple[str, ...]] = {}
    for flag in instruction.flags:
        name, equals, value = flag.removeprefix("--").partition("=")
        kind = kinds.get(name)
        if kind is None:
            raise instruction.fault(f"unknown flag --{name}")
        if name in values and kind != "list":
            raise instruction.fault(f"--{name} is given twice")
        if kind == "switch":
            value = value or "true"
            if value not in ("true", "false"):
                raise instruction.fault(f"--{name} is true or false, not {value!r}")
        elif not equals:
            raise instruction.fault(f"--{name} needs a value", remedy=f"write --{name}=VALUE")
        values[name] = (*values.get(name, ()), value)
    return Flags(values)
