"""The reference of the Python client, from its signatures and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import agentenv
from agentenv.client import answers, opening
from from_code import markdown

# What is read from an answer on the way to a sandbox.
_WITHIN = (answers.Made, answers.Refused)
_QUOTED = re.compile(r": '([^']*)'")  # an annotation that is not evaluated
_SECTION = re.compile(r"^(Args|Raises|Returns):\n((?:    .*(?:\n|$))+)", re.MULTILINE)


def text() -> str:
    """A section for what `agentenv` offers, then one for each kind of value."""
    names = [each for each in agentenv.__all__ if not each.startswith("__")]
    offered = [_class(f"agentenv.{name}", getattr(agentenv, name)) for name in sorted(names, key=_order)]
    values = [_class(kind.__name__, kind) for module in (answers, opening) for kind in _values(module)]
    return "".join(offered) + "".join(values)


def _order(name: str) -> tuple[bool, str]:
    """`Sandbox` first: the asynchronous one is told of by what differs."""
    return name != "Sandbox", name


def _values(module: ModuleType) -> Iterator[type]:
    """The dataclasses and typed dictionaries that a module defines and somebody outside gets or gives."""
    for kind in vars(module).values():
        own = isinstance(kind, type) and kind.__module__ == module.__name__ and kind not in _WITHIN
        if own and (dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)):
            yield kind


def _class(name: str, kind: type) -> str:
    if kind is agentenv.AsyncSandbox:
        methods = _list([f"await {each}" for each, _ in _methods(kind)])
    else:
        methods = "".join(_method(kind, *each) for each in _methods(kind))
    return markdown.heading(2, markdown.code(name), f"python-{name.replace('.', '-').lower()}") + (
        document(kind) + _fields(kind) + methods
    )


def _list(names: list[str]) -> str:
    return "".join(f"- {markdown.code(each)}\n" for each in names) + "\n"


def _fields(kind: type) -> str:
    """The table of a value's own fields."""
    if not dataclasses.is_dataclass(kind) and not typing.is_typeddict(kind):
        return ""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    rows = [
        (markdown.code(ast.unparse(each.target)), markdown.code(ast.unparse(each.annotation)))
        for each in definition.body
        if isinstance(each, ast.AnnAssign)
    ]
    return markdown.table(("field", "type"), rows)


def _methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """The public methods that a class defines itself."""
    for name, held in vars(kind).items():
        function = getattr(held, "__func__", None) or getattr(held, "method", None) or held
        if not name.startswith("_") and isinstance(function, FunctionType):
            yield name, function


def _method(kind: type, name: str, function: FunctionType) -> str:
    owner = kind.__name__ if isinstance(vars(kind)[name], classmethod) else kind.__name__.lower()
    return markdown.heading(3, markdown.code(f"{owner}.{name}")) + (
        markdown.block(f"{name}{_signature(function)}", "python") + document(function)
    )


def _signature(function: FunctionType) -> str:
    """Parameters one a line, without the object itself, as the source spells them."""
    signature = inspect.signature(function)
    given = [each for name, each in signature.parameters.items() if name not in ("self", "cls")]
    lines, starred = [], False
    for each in given:
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            lines.append("*")
            starred = True
        lines.append(_QUOTED.sub(r": \1", str(each)))
    returned = (
        "" if signature.return_annotation is inspect.Signature.empty else f" -> {signature.return_annotation}"
    )
    whole = f"({', '.join(lines)}){returned}"
    if len(whole) < 90:
        return whole
    return "(\n" + "".join(f"    {line},\n" for line in lines) + f"){returned}"


def document(thing: Any) -> str:
    """A docstring as Markdown: its sections become lists."""
    given = _SECTION.sub(_section, inspect.cleandoc(thing.__doc__ or ""))
    return markdown.prose(given) + "\n\n"


def _section(found: re.Match[str]) -> str:
    entries = re.split(r"\n(?=\S)", inspect.cleandoc(found[2]))
    return f"{found[1]}:\n\n" + "\n".join(f"- {' '.join(each.split())}" for each in entries)
