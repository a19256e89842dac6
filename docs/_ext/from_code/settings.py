"""The reference of settings, from the fields of `agentenv.config.Settings`."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from agentenv.config import Settings, default_docker_config, default_home
from from_code import markdown

# Defaults that are found out, not written down.
_FOUND: dict[Any, str] = {
    default_home: "`/var/lib/aenv` for root, `~/.local/share/aenv` for a user",
    default_docker_config: "`$DOCKER_CONFIG`, or `~/.docker`",
}

_KINDS = {int: "integer", float: "number", bool: "`true` or `false`", str: "text", Path: "path"}


def text() -> str:
    """A section for each setting, in the order of the code."""
    return "".join(_section(name, field) for name, field in Settings.model_fields.items())


def _section(name: str, field: FieldInfo) -> str:
    row = (markdown.code(f"AENV_{name.upper()}"), allowed(field), default(field))
    return (
        markdown.heading(2, markdown.code(name), f"setting-{name.replace('_', '-')}")
        + markdown.table(("variable", "value", "default"), [row])
        + markdown.prose(field.description or "")
        + "\n\n"
    )


def default(field: FieldInfo) -> str:
    """What a setting is where nobody says."""
    made = field.default_factory
    if made is not None and made in _FOUND:
        return _FOUND[made]
    given = field.get_default(call_default_factory=True, validated_data={})
    if given is None:
        return "none"
    if isinstance(given, bool):
        return markdown.code(str(given).lower())
    if isinstance(given, list):
        return ", ".join(markdown.code(each) for each in given) or "empty"
    return (
        markdown.code(f"{given:g}" if isinstance(given, float) else given) if given or given == 0 else "empty"
    )


def allowed(field: FieldInfo) -> str:
    """What may be said: a kind with its bounds, or words."""
    arguments = typing.get_args(field.annotation)
    if typing.get_origin(field.annotation) is typing.Literal:
        return ", ".join(markdown.code(each) for each in arguments)
    optional = type(None) in arguments
    kinds = [each for each in arguments if each is not type(None)] if optional else [field.annotation]
    return " or ".join(_kind(each) for each in kinds) + "".join(_bound(each) for each in field.metadata)


def _kind(annotation: Any) -> str:
    arguments = [_kind(each) for each in typing.get_args(annotation)]
    match typing.get_origin(annotation) or annotation:
        case kind if kind in _KINDS:
            return _KINDS[kind]
        case kind if kind is list:
            return f"list ({arguments[0]})"
        case kind if kind is dict:
            return f"table ({arguments[0]} = {arguments[1]})"
        case kind if dataclasses.is_dataclass(kind):
            return "table"
    raise TypeError(f"a setting of the type {annotation} has no words yet")


def _bound(bound: object) -> str:
    match bound:
        case Ge():
            return f", at least {bound.ge}"
        case Gt():
            return f", above {bound.gt}"
        case Le():
            return f", at most {bound.le}"
        case Lt():
            return f", below {bound.lt}"
    return ""
