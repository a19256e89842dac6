"""The reference of commands, from the tree of the command line itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from agentenv.cli import cli
from agentenv.cli.documents import LINES, SCHEMAS, Schema
from from_code import endpoints, markdown

_VERBATIM = "\b\n"


def text() -> str:
    """A section for each command: how it is called, what it does, its options."""
    root = click.Context(cli, info_name="aenv", **cli.context_settings)
    return "".join(_section(context) for context in every(root))


def every(context: click.Context) -> Iterator[click.Context]:
    """A command's context and those of all commands below it that are shown."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None, name
            if not command.hidden:
                yield from every(
                    click.Context(command, parent=context, info_name=name, **command.context_settings)
                )


def _section(context: click.Context) -> str:
    command, path = context.command, context.command_path
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    options = [
        each for each in command.get_params(context) if isinstance(each, click.Option) and not each.hidden
    ]
    level = 2 if context.parent is None or context.parent.parent is None else 3
    return (
        markdown.heading(level, markdown.code(path), path.replace(" ", "-"))
        + markdown.block(usage)
        + _help(command)
        + _document(tuple(path.split()[1:]))
        + markdown.table(
            ("option", "meaning"), [_option(each, context) for each in options if not _asks_help(each)]
        )
    )


def _document(path: tuple[str, ...]) -> str:
    """What it prints as JSON, where it does; objects of the API are linked."""
    schema = SCHEMAS.get(path)
    if schema is None:
        return ""
    said = endpoints.kind(schema) if "$ref" in str(schema) else _fields(schema)
    lines = ", one on each line" if path in LINES else ""
    return f"JSON: {said}{lines}.\n\n"


def _fields(schema: Schema) -> str:
    """An object's fields, or those of each item of a list."""
    if schema.get("type") == "array":
        return f"list of {_fields(schema['items'])}"
    fields = ", ".join(markdown.code(name) for name in schema["properties"])
    return f"object with {fields}"


def _help(command: click.Command) -> str:
    """What a command says of itself; paragraphs that the terminal shows as they are, stay so."""
    paragraphs = inspect.cleandoc(command.help or "").split("\f")[0].split("\n\n")
    return "".join(
        markdown.block(part.removeprefix(_VERBATIM))
        if part.startswith(_VERBATIM)
        else markdown.prose(part) + "\n\n"
        for part in paragraphs
    )


def _option(option: click.Option, context: click.Context) -> tuple[str, str]:
    record = option.get_help_record(context)
    assert record is not None, option
    return markdown.code(record[0]), markdown.prose(record[1])


def _asks_help(option: click.Option) -> bool:
    return "--help" in option.opts
