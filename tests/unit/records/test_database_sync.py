"""Making commits survive the host, also while another program reads."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from agentenv.errors import StoreFault
from agentenv.records.database import Database


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were synced by the database's own code."""
    seen: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        seen.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def insert(database: Database, name: str) -> None:
    with database.transaction() as cursor:
        cursor.execute("INSERT INTO templates VALUES (?, ?, 1, 0)", (name, name))


def test_the_log_is_synced_where_a_reader_keeps_it_from_being_written_back(
    tmp_path: Path, synced: list[str]
) -> None:
    database = Database(tmp_path / "aenv.db")
    insert(database, "one")
    database.sync()
    assert synced == []
    reader = sqlite3.connect(tmp_path / "aenv.db")
    try:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM templates").fetchone()
        insert(database, "two")
        database._connection.execute("PRAGMA busy_timeout=10")
        database.sync()
        assert synced == [str(tmp_path / "aenv.db-wal")]
        (tmp_path / "aenv.db-wal").rename(tmp_path / "elsewhere")
        with pytest.raises(StoreFault, match="not synced"):
            database.sync()
        (tmp_path / "elsewhere").rename(tmp_path / "aenv.db-wal")
    finally:
        reader.close()
        database.close()
