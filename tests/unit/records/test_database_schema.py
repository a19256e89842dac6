"""The database of an earlier version becomes one of this: templates are names with builds."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from agentenv.config import Settings
from agentenv.errors import StoreFault
from agentenv.records.database import SCHEMA_VERSION, Database
from agentenv.template.states import BuildState
from agentenv.template.store import Templates

# As version 1 had it, as far as it was changed.
FIRST = """
CREATE TABLE resources (id INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT, kind TEXT, name TEXT, detail TEXT,
                        boot_id TEXT, UNIQUE (kind, name));
CREATE TABLE templates (id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, build_id TEXT NOT NULL,
                        document TEXT NOT NULL, created_at REAL NOT NULL);
CREATE TABLE sandboxes (id TEXT PRIMARY KEY, state TEXT, template TEXT, started_at REAL, document TEXT);
CREATE TABLE snapshots (id TEXT PRIMARY KEY, kind TEXT, parent TEXT, sandbox TEXT, build_id TEXT,
                        created_at REAL, expires_at REAL, deleted_at REAL, document TEXT);
CREATE TABLE snapshot_names (name TEXT PRIMARY KEY, snapshot TEXT);
PRAGMA user_version=1;
"""
TEMPLATE = {
    "id": "t1",
    "name": "base",
    "build_id": "3da76907-b52b-4305-996b-c8536d4a0685",
    "rootfs": "/var/lib/aenv/images/base.ext4",
    "disk_mib": 2048,
    "memory_mib": 512,
    "vcpus": 1,
    "source": "debootstrap:bookworm",
    "recipe": "r",
    "digest": "sha256:0",
    "size_bytes": 12,
    "default_user": "user",
    "default_workdir": "/home/user",
    "created_at": 1000.5,
    "updated_at": 2000.25,
    "env": {"LANG": "C.UTF-8"},
    "entrypoint": ["/init"],
    "cmd": [],
}


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    path = tmp_path / "aenv.db"
    connection = sqlite3.connect(path)
    connection.executescript(FIRST)
    connection.execute(
        "INSERT INTO templates VALUES (?, ?, ?, ?, ?)",
        ("t1", "base", TEMPLATE["build_id"], json.dumps(TEMPLATE), 1000.5),
    )
    connection.commit()
    connection.close()
    return path


def test_templates_of_the_first_version_are_kept(earlier: Path, tmp_path: Path) -> None:
    database = Database(earlier)
    templates = Templates(database, Settings(home=tmp_path))
    made = templates.get("base")
    assert templates.get("t1:default") == made
    shown = {**TEMPLATE, "rootfs": Path(str(TEMPLATE["rootfs"])), "entrypoint": ("/init",), "cmd": ()}
    assert {name: getattr(made, name) for name in shown} == shown
    [build] = templates.named("base").builds
    assert (build.state, build.tags, build.created_at) == (BuildState.READY, ("default",), 1000.5)
    database.close()
    again = Database(earlier)
    assert Templates(again, Settings(home=tmp_path)).get("base") == made
    assert _tables(again) == _tables(Database(tmp_path / "new.db"))


def _tables(database: Database) -> dict[str, set[str]]:
    """The tables that were changed, with their columns."""
    names = ("templates", "builds", "template_tags", "build_logs", "steps")
    return {name: {row["name"] for row in database.query(f"PRAGMA table_info({name})")} for name in names}


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "aenv.db"
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(StoreFault, match="program version"):
        Database(path)
