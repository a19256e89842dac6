"""A store of snapshots over a template's image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.snapshot.store import Snapshots


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "base.ext4").write_bytes(b"rootfs!")
    return tmp_path


@pytest.fixture
def database(home: Path) -> Iterator[Database]:
    database = Database(home / "aenv.db")
    yield database
    database.close()


@pytest.fixture
def store(database: Database, home: Path) -> Snapshots:
    return Snapshots(database, Ledger(database), home)
