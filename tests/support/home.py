"""Data directories for tests: copies of the prepared one that cost links, not bytes."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from agentenv import config
from agentenv.records.database import Database


def prepared_home() -> Path:
    """The data directory that `scripts/test` prepared: guest files and the template `base`."""
    home = config.load().home
    if os.geteuid() != 0:
        pytest.fail("tests of real machines need root: run scripts/test")
    if not (home / "aenv.db").exists() or not (home / "guest").is_dir():
        pytest.fail(f"{home} is not set up: run scripts/test, which prepares it")
    return home


def linked_home(target: Path) -> Path:
    """A data directory of its own with the prepared guest files and templates, and no past."""
    source = prepared_home()
    target.mkdir(parents=True)
    for name in ("guest", "images"):
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, copy_function=os.link, symlinks=True)
    original, copy = sqlite3.connect(source / "aenv.db"), sqlite3.connect(target / "aenv.db")
    try:
        original.backup(copy)
        Database(target / "aenv.db").close()  # of this version, whichever the prepared one is
        for table in ("resources", "sandboxes", "idempotency", "snapshots", "snapshot_names"):
            copy.execute(f"DELETE FROM {table}")
        moved = "json_set(document, '$.made.rootfs', replace(document ->> '$.made.rootfs', ?, ?))"
        copy.execute(f"UPDATE builds SET document = {moved}", (str(source), str(target)))
        copy.commit()
    finally:
        original.close()
        copy.close()
    return target
