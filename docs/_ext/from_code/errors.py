"""The reference of errors: the tree with status and codes, and each remedy that the code offers."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from agentenv import errors as tree
from agentenv.errors import AenvError
from from_code import markdown, sources

_MISSING = "…"


@dataclass(frozen=True)
class Raised:
    """A place where an error is made: what it says, with `…` for what differs, and what to do."""

    kind: type[AenvError]
    message: str
    remedy: str | None


def text() -> str:
    """A table of all errors, then a section for each."""
    kinds = [each for each in sources.errors() if each is not AenvError]
    said: dict[type[AenvError], list[Raised]] = defaultdict(list)
    for each in raised():
        said[each.kind].append(each)
    rows = [
        (
            str(each.status),
            _name(each),
            markdown.code(each.code),
            str(each.exit_code),
            "yes" if each.retry else "",
        )
        for each in sorted(kinds, key=lambda one: one.status)
    ]
    header = ("status", "error", "code", "exit code", "a retry can help")
    return markdown.table(header, rows) + "".join(_section(each, said[each]) for each in kinds)


def raised() -> list[Raised]:
    """Every place of the program where an error of the tree is made with a message of its own."""
    found = [each for module in sources.modules() for each in _of_module(module)]
    return sorted(set(found), key=lambda each: (each.message, each.remedy or ""))


def _of_module(module: ModuleType) -> Iterator[Raised]:
    place = inspect.getsourcefile(module)
    if place is None:
        return
    for node in ast.walk(ast.parse(Path(place).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            kind = getattr(module, node.func.id, None) or getattr(tree, node.func.id, None)
            if isinstance(kind, type) and issubclass(kind, AenvError):
                given = [each.value for each in node.keywords if each.arg == "remedy"]
                remedies: list[str | None] = [words for each in given for words in _words(each)]
                for message in _words(node.args[0]) or [_MISSING]:
                    for remedy in remedies or [None]:
                        yield Raised(kind, message, remedy)


def _words(node: ast.expr) -> list[str]:
    """The texts that an expression can be, with `…` for what is only known when it runs; none, if all is."""
    match node:
        case ast.Constant(str(value)):
            return [value]
        case ast.JoinedStr(values):
            return [
                "".join(_words(each)[0] if isinstance(each, ast.Constant) else _MISSING for each in values)
            ]
        case ast.IfExp(_, one, other):
            return _words(one) + _words(other)
        case ast.BinOp(left, ast.Add(), right):
            return [a + b for a in _words(left) or [_MISSING] for b in _words(right) or [_MISSING]]
    return []


def _name(kind: type[AenvError]) -> str:
    return f"[{markdown.code(kind.__name__)}](#{_target(kind)})"


def _target(kind: type[AenvError]) -> str:
    return f"error-{kind.__module__.replace('.', '-').removeprefix('agentenv-')}-{kind.__name__}".lower()


def _section(kind: type[AenvError], said: list[Raised]) -> str:
    """What a class means, and every remedy that some instance of it has."""
    parent = kind.__base__
    facts = [f"Status {kind.status}", f"code {markdown.code(kind.code)}", f"exit code {kind.exit_code}"]
    if kind.e2b_code:
        facts.append(f"for E2B's clients {markdown.code(kind.e2b_code)}")
    if parent is not AenvError and parent is not None and issubclass(parent, AenvError):
        facts.append(f"a kind of {_name(parent)}")
    if kind.retry:
        facts.append("a retry can help")
    rows = [
        (markdown.prose(each.message), markdown.prose(each.remedy))
        for each in said
        if each.remedy is not None
    ]
    return (
        markdown.heading(2, markdown.code(kind.__name__), _target(kind))
        + "; ".join(facts)
        + ".\n\n"
        + markdown.prose(inspect.cleandoc(kind.__doc__ or ""))
        + "\n\n"
        + markdown.table(("what it says", "what to do"), rows)
    )
