"""The variables of a Dockerfile: ARG and ENV, where they hold, and the words that use them.

A base image has variables of its own (its `Env`), which are not known here. A word whose value does not
depend on such a one is expanded; in ENV the rest is left to the node, everywhere else it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from e2b_dockerfile_utils import ShellLex

from agentenv.dockerfile.syntax import Instruction

# May be given by --build-arg without an ARG (Dockerfile reference, "Predefined ARGs").
PROXY_ARGS = tuple(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for name in (upper, upper.lower())
)
# Known before the first FROM, and in a stage after `ARG NAME` ("Automatic platform ARGs").
PLATFORM = "linux/amd64"
PLATFORM_ARGS: Mapping[str, str] = {
    f"{side}{name}": value
    for side in ("TARGET", "BUILD")
    for name, value in (("PLATFORM", PLATFORM), ("OS", "linux"), ("ARCH", "amd64"), ("VARIANT", ""))
}
# Tell BuildKit how to work; nothing here reads them.
BUILDER_ARGS = re.compile(r"BUILDKIT_[A-Z0-9_]+|SOURCE_DATE_EPOCH")
# What a node replaces in the value of an ENV.
_NODES_EXPAND = re.compile(r"\$([A-Za-z_]\w*|\{[A-Za-z_]\w*(:?[-+][^{}]*)?\})", re.ASCII)
_MARK = "\ufdd0"  # a character that no text may hold: stands for a value nobody knows


@dataclass
class Arguments:
    """What --build-arg gave, and which of it was asked for."""

    given: Mapping[str, str]
    used: set[str] = field(default_factory=set)

    def take(self, name: str) -> str | None:
        """The value given for `name`, noted as used."""
        if name not in self.given:
            return None
        self.used.add(name)
        return self.given[name]

    @property
    def unused(self) -> list[str]:
        """What no ARG asked for."""
        known = self.used.union(PROXY_ARGS)
        return sorted(name for name in self.given if name not in known and not BUILDER_ARGS.fullmatch(name))


@dataclass
class Scope:
    """The variables that hold at one place.

    Attributes:
        args: ARG; None for one that has no value.
        env: ENV, which wins over an ARG of the same name. None where the value is the node's to find out.
        closed: whether there are no other variables (before the first FROM).
    """

    args: dict[str, str | None] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)
    closed: bool = False

    def copy(self) -> Scope:
        """The same variables, to go on from."""
        return Scope(dict(self.args), dict(self.env), self.closed)

    def build_only(self) -> dict[str, str]:
        """What commands see while building, and nothing sees afterwards: ARGs that no ENV hides."""
        return {
            name: value for name, value in self.args.items() if value is not None and name not in self.env
        }

    def expand(self, instruction: Instruction, word: str, escape: str) -> str:
        """The word with its quotes removed and its variables replaced.

        Raises:
            DockerfileError: it is malformed, or its value depends on a variable of the base image.
        """
        return self._known(instruction, word, _words(escape))

    def expand_text(self, instruction: Instruction, text: str, escape: str) -> str:
        """The body of a heredoc with its variables replaced; quotes mean nothing there.

        Raises:
            DockerfileError: as `expand`.
        """
        return self._known(instruction, text, _words(escape, skip_process_quotes=True))

    def expand_value(self, instruction: Instruction, word: str, escape: str) -> tuple[str, bool]:
        """The value of an ENV, and whether it is known whole.

        What is not known stands in it as `$NAME` or `${NAME…}`, for the node to expand.

        Raises:
            DockerfileError: it is malformed, or has a dollar sign that the node would take for a variable.
        """
        lex = _words(escape)
        try:
            value, unknown = self._settle(word, lex)
            if not unknown:
                return value, True
            partly = lex(_Names(self, unset_is_empty=True), True)(word)
            literal = lex(_Names(self, unknown=_MARK), False)(word)
        except ValueError as error:
            raise instruction.fault(str(error)) from None
        if "$" in literal:
            raise instruction.fault(
                f"{word}: a literal dollar sign beside a variable of the base image ({', '.join(unknown)})",
                remedy="set the two in ENVs of their own",
            )
        if "$" in _NODES_EXPAND.sub("", partly):
            raise instruction.fault(
                f"{word}: what the base image sets ({', '.join(unknown)}) can be taken whole only",
                remedy="nodes know $NAME, ${NAME}, ${NAME:-word} and ${NAME:+word}",
            )
        return partly, False

    def _known(self, instruction: Instruction, word: str, lex: _Lex) -> str:
        try:
            value, unknown = self._settle(word, lex)
        except ValueError as error:
            raise instruction.fault(str(error)) from None
        if unknown:
            names = ", ".join(sorted(unknown))
            raise instruction.fault(
                f"{names} is not set in this Dockerfile, and a value from the base image is not known here",
                remedy=f"add `ARG {unknown[0]}=…` or `ENV {unknown[0]}=…`, or quote the dollar sign",
            )
        return value

    def _settle(self, word: str, lex: _Lex) -> tuple[str, list[str]]:
        """The value, and the unknown names it depends on: those whose setting would change it."""
        names = _Names(self)
        value = lex(names, False)(word)
        if self.closed or not names.missed:
            return value, []
        other = lex(_Names(self, unknown=_MARK), False)(word)
        return value, ([] if other == value else sorted(names.missed))


_Lex = Callable[["_Names", bool], Callable[[str], str]]


def _words(escape: str, *, skip_process_quotes: bool = False) -> _Lex:
    def lexer(names: _Names, keep_unset: bool) -> Callable[[str], str]:
        return ShellLex(
            escape, skip_process_quotes=skip_process_quotes, env=names, skip_unset_env=keep_unset
        ).process_word

    return lexer


class _Names(Mapping[str, str]):
    """A scope as the lexer asks for it; `missed` are the names asked for that the scope does not know.

    Args:
        unknown: what those are worth; None: nothing, they are unset.
        unset_is_empty: an ARG without a value is "" instead of unset (where what is unset is left standing).
    """

    def __init__(self, scope: Scope, *, unknown: str | None = None, unset_is_empty: bool = False) -> None:
        self._scope, self._unknown, self._unset_is_empty = scope, unknown, unset_is_empty
        self.missed: set[str] = set()

    def __getitem__(self, name: str) -> str:
        scope = self._scope
        for declared in (scope.env, scope.args):
            if name in declared:
                value = declared[name]
                if value is not None:
                    return value
                if declared is scope.args:
                    if self._unset_is_empty:
                        return ""
                    raise KeyError(name)
                break
        self.missed.add(name)
        if self._unknown is None:
            raise KeyError(name)
        return self._unknown

    def __iter__(self) -> Iterator[str]:
        return iter({**self._scope.args, **self._scope.env})

    def __len__(self) -> int:
        return len({**self._scope.args, **self._scope.env})
