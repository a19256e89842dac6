"""The tables of snapshots and their names. A record's names are rows of their own, each there once."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import astuple, replace

from agentenv.errors import Conflict, StoreFault
from agentenv.records.database import Database
from agentenv.snapshot.names import canonical, untagged
from agentenv.snapshot.records import Resources, Snapshot, decode, encode

_SELECT = (
    "SELECT document, (SELECT json_group_array(name) FROM snapshot_names WHERE snapshot = id) AS names"
    " FROM snapshots"
)


class Table:
    """Rows in the node's database, used on the thread that opened it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def insert(self, record: Snapshot, ledger_id: int) -> None:
        """Keep a new record and strike the ledger's entry of its making, at once. A name that another
        snapshot has goes over to this one.

        Raises:
            Conflict: a template has one of the names.
        """
        with self._database.transaction() as cursor:
            cursor.execute(
                "INSERT INTO snapshots"
                " (id, kind, parent, sandbox, build_id, created_at, expires_at, document)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    record.id,
                    record.kind,
                    record.parent,
                    record.sandbox_id,
                    record.template.build_id,
                    record.created_at,
                    record.expires_at,
                    _document(record),
                ),
            )
            for name in record.names:
                _refuse_template(cursor, name)
                cursor.execute(
                    "INSERT INTO snapshot_names (name, snapshot) VALUES (?, ?)"
                    " ON CONFLICT (name) DO UPDATE SET snapshot = excluded.snapshot",
                    (name, record.id),
                )
            cursor.execute("DELETE FROM resources WHERE id = ?", (ledger_id,))

    def update(self, record: Snapshot) -> None:
        """Replace a record; its names stay as they are.

        Raises:
            StoreFault: there is none any more.
        """
        with self._database.transaction() as cursor:
            cursor.execute(
                "UPDATE snapshots SET expires_at = ?, document = ? WHERE id = ?",
                (record.expires_at, _document(record), record.id),
            )
            if not cursor.rowcount:
                raise StoreFault(f"the snapshot {record.id} has no record any more")

    def delete(self, snapshot_id: str, at: float) -> bool:
        """Mark a record deleted and free its names; False when it was already, or is not there."""
        with self._database.transaction() as cursor:
            cursor.execute(
                "UPDATE snapshots SET deleted_at = ?1, document = json_set(document, '$.deleted_at', ?1)"
                " WHERE id = ?2 AND deleted_at IS NULL",
                (at, snapshot_id),
            )
            changed = cursor.rowcount > 0
            cursor.execute("DELETE FROM snapshot_names WHERE snapshot = ?", (snapshot_id,))
        return changed

    def drop(self, ids: tuple[str, ...]) -> None:
        """Forget deleted records of which nothing is left."""
        with self._database.transaction() as cursor:
            for snapshot_id in ids:
                cursor.execute(
                    "DELETE FROM snapshots WHERE id = ? AND deleted_at IS NOT NULL", (snapshot_id,)
                )

    def all(self) -> list[Snapshot]:
        """All records, deleted ones included, oldest first."""
        return self._read(f"{_SELECT} ORDER BY created_at, id")

    def get(self, snapshot_id: str) -> Snapshot | None:
        """The record of an id, deleted or not."""
        found = self._read(f"{_SELECT} WHERE id = ?", snapshot_id)
        return found[0] if found else None

    def named(self, name: str) -> Snapshot | None:
        """The record that has a canonical name."""
        found = self._read(f"{_SELECT} WHERE id = (SELECT snapshot FROM snapshot_names WHERE name = ?)", name)
        return found[0] if found else None

    def first_of_build(self, build_id: str, resources: Resources | None = None) -> Snapshot | None:
        """The template snapshot of a build, the newest if it was made anew; for machines of that size where
        it is said."""
        size = (None,) * 3 if resources is None else astuple(resources)
        found = self._read(
            f"{_SELECT} WHERE build_id = ?1 AND kind = 'template' AND deleted_at IS NULL"
            " AND (?2 IS NULL OR (document ->> '$.resources.vcpus' = ?2"
            " AND document ->> '$.resources.memory_mib' = ?3 AND document ->> '$.resources.disk_mib' = ?4))"
            " ORDER BY created_at DESC, id LIMIT 1",
            build_id,
            *size,
        )
        return found[0] if found else None

    def expired(self, now: float) -> list[Snapshot]:
        """Records whose time is over, oldest first."""
        return self._read(
            f"{_SELECT} WHERE expires_at <= ? AND deleted_at IS NULL ORDER BY created_at, id", now
        )

    def sync(self) -> None:
        """Make what was committed survive the host."""
        self._database.sync()

    def _read(self, sql: str, *parameters: object) -> list[Snapshot]:
        return [_record(row) for row in self._database.query(sql, parameters)]


def _document(record: Snapshot) -> str:
    return encode(replace(record, names=()))


def _record(row: sqlite3.Row) -> Snapshot:
    names = tuple(sorted(json.loads(row["names"])))
    return replace(decode(row["document"]), names=names)


def _refuse_template(cursor: sqlite3.Cursor, name: str) -> None:
    if name != canonical(name):
        raise Conflict(f"{name!r} is not a whole name: it lacks its tag")
    if cursor.execute("SELECT 1 FROM templates WHERE name = ?", (untagged(name),)).fetchone():
        raise Conflict(
            f'"{untagged(name)}" is the name of a template', remedy="give the snapshot another name"
        )
