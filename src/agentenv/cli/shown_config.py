"""`aenv config`: the settings of a node here, and where each comes from."""

from __future__ import annotations

import os
from operator import itemgetter
from pathlib import Path

import click

from agentenv.cli.options import home_option
from agentenv.cli.output import Column, form_of, form_option, show

SECRET = frozenset({"api_key"})


@click.group("config")
def command() -> None:
    """Look at the settings of a node on this machine."""


@command.command("show")
@click.option("--set", "only_set", is_flag=True, help="Those alone that are not the default.")
@form_option
@home_option
def show_(only_set: bool, form: str | None, home: Path | None) -> None:
    """Show every setting, its value, and where that comes from: a variable, aenv.toml, or the default.

    \b
    Examples:
      aenv config show
      aenv config show --set
    """
    import tomllib

    from agentenv import config

    settings = config.load(home=home)
    file = settings.home / "aenv.toml"
    in_file = tomllib.loads(file.read_text()) if file.exists() else {}
    rows = []
    for name in sorted(type(settings).model_fields):
        variable = f"AENV_{name.upper()}"
        by_option = name == "home" and home is not None
        origin = (
            "--home"
            if by_option
            else variable
            if variable in os.environ
            else str(file)
            if name in in_file
            else "default"
        )
        value = getattr(settings, name)
        shown = "(hidden)" if name in SECRET and value else str(value)
        rows.append({"name": name, "value": shown, "from": origin})
    if only_set:
        rows = [row for row in rows if row["from"] != "default"]
    columns: tuple[Column, ...] = tuple((name, itemgetter(name)) for name in ("name", "value", "from"))
    show(rows, columns, form_of(form), key="name")
