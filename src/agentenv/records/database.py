"""The node's SQLite database: one file, opened by the node and by commands beside it.

Writes are synchronous calls on the caller's thread: in WAL mode without a sync per commit one
costs tens of microseconds, which is less than handing it to another thread. A commit survives the
death of the process; `sync()` makes everything before it survive the death of the host as well.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentenv.errors import StoreCorrupt, StoreFault, StoreFull

SCHEMA_VERSION = 3

SCHEMA = """
CREATE TABLE resources (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given twice
    owner   TEXT NOT NULL,      -- the machine, template or node it belongs to
    kind    TEXT NOT NULL,      -- process, slot, directory, socket, mount, cgroup, rule, ...
    name    TEXT NOT NULL,      -- what identifies it on the host
    detail  TEXT NOT NULL,      -- JSON object: all that is needed to find and release it
    boot_id TEXT NOT NULL,      -- the host boot during which it was made
    UNIQUE (kind, name)
);
CREATE INDEX resources_owner ON resources (owner);

CREATE TABLE templates (
    id         TEXT PRIMARY KEY,
    name       TEXT NOT NULL UNIQUE,
    public     INTEGER NOT NULL,
    created_at REAL NOT NULL
);

CREATE TABLE builds (
    id         TEXT PRIMARY KEY,
    template   TEXT NOT NULL REFERENCES templates (id) ON DELETE CASCADE,
    state      TEXT NOT NULL,
    created_at REAL NOT NULL,
    document   TEXT NOT NULL    -- JSON, see template/records.py
);
CREATE INDEX builds_template ON builds (template, created_at);

CREATE TABLE template_tags (
    template    TEXT NOT NULL REFERENCES templates (id) ON DELETE CASCADE,
    tag         TEXT NOT NULL,
    build       TEXT NOT NULL REFERENCES builds (id) ON DELETE CASCADE,
    assigned_at REAL NOT NULL,
    PRIMARY KEY (template, tag)
);
CREATE INDEX template_tags_build ON template_tags (build);

CREATE TABLE build_logs (
    build   TEXT NOT NULL REFERENCES builds (id) ON DELETE CASCADE,
    number  INTEGER NOT NULL,   -- from 0 without gaps
    at      REAL NOT NULL,
    level   TEXT NOT NULL,
    step    TEXT,
    message TEXT NOT NULL,
    PRIMARY KEY (build, number)
) WITHOUT ROWID;

CREATE TABLE steps (
    key      TEXT PRIMARY KEY,  -- see building/keys.py
    snapshot TEXT NOT NULL,
    used_at  REAL NOT NULL
);

CREATE TABLE sandboxes (
    id         TEXT PRIMARY KEY,
    state      TEXT NOT NULL,
    template   TEXT NOT NULL,
    started_at REAL NOT NULL,
    document   TEXT NOT NULL    -- JSON, see sandbox/records.py
);
CREATE INDEX sandboxes_started ON sandboxes (started_at DESC, id);

CREATE TABLE snapshots (
    id         TEXT PRIMARY KEY,
    kind       TEXT NOT NULL,
    parent     TEXT,
    sandbox    TEXT,            -- the one it was taken of
    build_id   TEXT NOT NULL,   -- of the template it descends from
    created_at REAL NOT NULL,
    expires_at REAL,
    deleted_at REAL,            -- its layers may still be in use by others
    document   TEXT NOT NULL    -- JSON, see snapshot/records.py
);
CREATE INDEX snapshots_sandbox ON snapshots (sandbox);
CREATE INDEX snapshots_build ON snapshots (build_id);

CREATE TABLE snapshot_names (
    name     TEXT PRIMARY KEY,  -- with its tag
    snapshot TEXT NOT NULL REFERENCES snapshots (id) ON DELETE CASCADE
);
CREATE INDEX snapshot_names_snapshot ON snapshot_names (snapshot);

CREATE TABLE idempotency (
    key        TEXT PRIMARY KEY,
    request    TEXT NOT NULL,   -- digest of the request body
    sandbox    TEXT NOT NULL,
    created_at REAL NOT NULL
);

CREATE TABLE api_keys (
    id       TEXT PRIMARY KEY,
    document TEXT NOT NULL      -- JSON, see identity/records.py
);
"""


# From the version before to each. What a template was, is its one build now.
MIGRATIONS = {
    2: """
ALTER TABLE templates RENAME TO before;
{tables};
INSERT INTO templates SELECT id, name, 1, created_at FROM before;
INSERT INTO builds SELECT build_id, id, 'ready', created_at, json_object(
    'id', build_id, 'template_id', id, 'state', 'ready', 'created_at', created_at,
    'updated_at', document ->> 'updated_at', 'tags', json_array('default'), 'made', json(document)
) FROM before;
INSERT INTO template_tags SELECT id, 'default', build_id, created_at FROM before;
DROP TABLE before
""",
    3: "{tables}",
}
_NEW_TABLES = {2: ("templates", "builds", "template_tags", "build_logs", "steps"), 3: ("api_keys",)}


class Database:
    """A connection with the schema in place. Not shared between threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=10.0)
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute("PRAGMA foreign_keys=ON")
            self._migrate()
        except sqlite3.Error as error:
            raise _translated(error, path) from error

    def _migrate(self) -> None:
        with self.transaction() as cursor:
            version = cursor.execute("PRAGMA user_version").fetchone()[0]
            if version == SCHEMA_VERSION:
                return
            if version > SCHEMA_VERSION:
                raise StoreFault(
                    f"{self.path} has schema version {version}, this program has {SCHEMA_VERSION}",
                    remedy="use the program version that wrote it, or another AENV_HOME",
                )
            for statement in _statements(version):
                cursor.execute(statement)
            cursor.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Cursor]:
        """A write transaction; committed at the end, rolled back on an exception."""
        cursor = self._connection.cursor()
        try:
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield cursor
            except BaseException:
                cursor.execute("ROLLBACK")
                raise
            cursor.execute("COMMIT")
        except sqlite3.Error as error:
            raise _translated(error, self.path) from error
        finally:
            cursor.close()

    def query(self, sql: str, parameters: tuple[object, ...] = ()) -> list[sqlite3.Row]:
        """The rows of a SELECT."""
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise _translated(error, self.path) from error

    def sync(self) -> None:
        """Make all commits so far survive the host: the log is written back and synced.

        Raises:
            StoreFull, StoreFault: they may not.
        """
        try:
            busy = self._connection.execute("PRAGMA wal_checkpoint(FULL)").fetchone()[0]
        except sqlite3.Error as error:
            raise _translated(error, self.path) from error
        if busy:  # another program reads: the log cannot be written back now, but synced as it is
            self._sync_log()

    def _sync_log(self) -> None:
        try:
            descriptor = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreFault(f"the log of {self.path} is not synced: {error.strerror}") from error

    def close(self) -> None:
        """Close the connection; the object is of no use afterwards."""
        self._connection.close()


def _statements(version: int) -> list[str]:
    """What makes the schema out of that of `version`; 0 is an empty file."""
    if version == 0:
        return _split(SCHEMA)
    found: list[str] = []
    for step in range(version + 1, SCHEMA_VERSION + 1):
        tables = ";".join(each for each in _split(SCHEMA) if _makes(each, _NEW_TABLES[step]))
        found += _split(MIGRATIONS[step].format(tables=tables))
    return found


def _split(script: str) -> list[str]:
    return [statement for statement in script.split(";") if statement.strip()]


def _makes(statement: str, tables: tuple[str, ...]) -> bool:
    """Whether a statement creates one of the tables, or an index of it."""
    words = statement.split()
    return words[2] in tables if words[1] == "TABLE" else words[4] in tables


def _translated(error: sqlite3.Error, path: Path) -> StoreFault:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(f"no space for the database {path}", remedy="free space on its filesystem")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreCorrupt(f"the database {path} is damaged: {error}", remedy="restore it from a backup")
    return StoreFault(f"database {path}: {error}")
