"""`aenv fsck`: the records of a data directory against its files."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from agentenv.cli.options import home_option
from agentenv.cli.output import Column, Row, form_of, form_option, show
from agentenv.cli.root import require_root
from agentenv.errors import Conflict

COLUMNS: tuple[Column, ...] = (
    ("path", lambda row: row["path"]),
    ("problem", lambda row: row["problem"]),
    ("snapshots", lambda row: " ".join(row["snapshots"])),
)


@click.command("fsck")
@click.option("--digests", is_flag=True, help="Read all files, and compare what is in them: takes its time.")
@click.option("--repair", is_flag=True, help="Remove files that nothing refers to; no node may run.")
@form_option
@home_option
def command(digests: bool, repair: bool, form: str | None, home: Path | None) -> None:
    """Look whether all files that snapshots and sandboxes need are there, and which nobody needs.

    Nothing is changed, but with --repair what no record names. A snapshot whose file is missing or damaged
    stays on record: what is started from it is refused, and deleting it is yours to decide. Ends with 1 when
    something that is needed is missing or damaged.

    \b
    Examples:
      aenv fsck
      aenv fsck --digests --output json
    """
    import asyncio

    from agentenv import config, run_record
    from agentenv.records.database import Database
    from agentenv.records.ledger import Ledger
    from agentenv.sandbox.records import Records
    from agentenv.snapshot.store import Snapshots

    settings = config.load(home=home)
    require_root(settings)
    if repair and run_record.read(settings) is not None:
        raise Conflict(
            f"a node runs on {settings.home}, and clears away by itself", remedy="aenv node stop, then again"
        )
    database = Database(settings.database)
    try:
        sandboxes = Records(database).unended()
        if repair and any(each.machine is not None for each in sandboxes):
            raise Conflict(
                "sandboxes run on without their node", remedy="aenv node start adopts them, and clears away"
            )
        in_use = {name for each in sandboxes for name in (each.snapshot, each.start) if name}
        snapshots = Snapshots(database, Ledger(database), settings.home)
        problems = snapshots.check(digests=digests)
        garbage = asyncio.run(snapshots.collect(in_use=in_use, dry_run=not repair))
    finally:
        database.close()
    rows: list[Row] = [
        {"path": each.path, "problem": each.what, "snapshots": list(each.snapshots)} for each in problems
    ]
    done = "was needed by nothing and is removed" if repair else "is needed by nothing"
    rows += [{"path": str(path), "problem": done, "snapshots": []} for path in garbage.files]
    show(rows, COLUMNS, form_of(form), key="path")
    sys.exit(1 if problems else 0)
