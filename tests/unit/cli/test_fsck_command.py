"""`aenv fsck` on a data directory that has real files."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agentenv import progress, run_record
from agentenv.cli import cli, meter
from agentenv.config import Settings
from agentenv.errors import AenvError, Conflict, NotFound, StoreCorrupt, StoreFault
from agentenv.records.database import SCHEMA_VERSION, Database
from agentenv.records.ledger import Ledger
from agentenv.snapshot.records import Snapshot
from agentenv.snapshot.store import Snapshots
from agentenv.template.create import KIND
from support.snapshots import add, names_below

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a node's data directory is root's")


@pytest.fixture
async def home(tmp_path: Path) -> Path:
    """A data directory with a snapshot."""
    base = tmp_path / "images/base.ext4"
    base.parent.mkdir()
    base.write_bytes(b"content")
    await add(store_of(tmp_path))
    return tmp_path


def store_of(home: Path) -> Snapshots:
    database = Database(home / "aenv.db")
    return Snapshots(database, Ledger(database), home)


@pytest.fixture
def snapshot(home: Path) -> Snapshot:
    (found,) = store_of(home).of_kinds(("checkpoint",))
    return found


@pytest.fixture
def held(home: Path) -> Iterator[None]:
    with run_record.hold(home):
        yield


def fsck(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["fsck", "--home", str(home), *arguments])


def found(result: Result, exit_code: int = 1) -> list[dict[str, Any]]:
    assert result.exit_code == exit_code, (result.output, result.exception)
    findings: list[dict[str, Any]] = json.loads(result.stdout)
    return findings


def fault(result: Result) -> AenvError:
    assert isinstance(result.exception, AenvError), result.output
    return result.exception


def state_of(home: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in home.rglob("*") if path.is_file()
    }


def test_all_is_well(home: Path) -> None:
    before = names_below(home)
    assert found(fsck(home, "--digests"), 0) == []
    told = fsck(home, "--output", "table")
    assert (told.exit_code, told.stdout, told.stderr) == (0, "", "all is as recorded\n")
    assert names_below(home) == before


def test_reading_all_of_it_tells_how_far_it_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((progress, "EVERY_S"), (meter, "PLAIN_EVERY_S")):
        monkeypatch.setattr(module, name, 0.0)
    told = fsck(home, "--digests")
    assert told.stderr.startswith("reading snapshots:  ")
    assert found(told, 0) == []
    assert fsck(home, "--digests", "--quiet").stderr == ""


def test_a_file_that_is_missing_or_too_short(home: Path, snapshot: Snapshot) -> None:
    assert snapshot.state is not None
    (home / snapshot.state.path).unlink()
    (home / snapshot.disk[-1].path).write_bytes(b"short")
    problems = {each["path"]: each for each in found(fsck(home))}
    assert problems[snapshot.state.path]["what"] == "is missing"
    assert "has 5 bytes" in problems[snapshot.disk[-1].path]["what"]
    assert all(each["concerns"] == [snapshot.id] and not each["repairable"] for each in problems.values())
    assert found(fsck(home, "--repair"))  # no repair brings them back
    assert "is missing" in fsck(home, "--output", "table").stdout


def test_what_belongs_to_nobody_is_removed_if_asked(home: Path) -> None:
    for name in ("sxstray", "sxother"):
        (home / "snapshots" / name).mkdir()
        (home / "snapshots" / name / "memory").write_bytes(b"left")
    before = state_of(home / "snapshots")
    assert [each["path"] for each in found(fsck(home))] == ["snapshots/sxother", "snapshots/sxstray"]
    assert "aenv fsck --repair" in fsck(home, "--output", "table").stderr
    assert state_of(home / "snapshots") == before

    assert all(each["repaired"] for each in found(fsck(home, "--repair"), 0))
    assert found(fsck(home), 0) == []
    assert state_of(home / "snapshots").items() < before.items()


def test_what_is_being_made_is_left_alone(home: Path) -> None:
    draft = store_of(home).begin("i1")
    assert found(fsck(home, "--repair"), 0) == []
    assert draft.path.is_dir()


def test_what_a_killed_build_left(home: Path) -> None:
    rootfs = home / "images/half.ext4"
    rootfs.write_bytes(b"half")
    database = Database(home / "aenv.db")
    ledger = Ledger(database)
    ledger.record("b1", KIND, "b1", rootfs=str(rootfs), tree=str(home / "tree"), pid=None, started=None)
    (problem,) = found(fsck(home))
    assert (problem["what"], problem["concerns"]) == ("was left by a build that ended", ["b1"])
    assert rootfs.exists()
    (mended,) = found(fsck(home, "--repair"), 0)
    assert mended["repaired"]
    assert not rootfs.exists()
    assert ledger.entries(kind=KIND) == []


@pytest.mark.usefixtures("held")
def test_repair_is_refused_while_a_node_has_the_directory(home: Path) -> None:
    assert found(fsck(home), 0) == []
    refusal = fault(fsck(home, "--repair"))
    assert isinstance(refusal, Conflict)
    assert refusal.remedy


def test_no_data_directory(tmp_path: Path) -> None:
    assert isinstance(fault(fsck(tmp_path)), NotFound)
    assert list(tmp_path.iterdir()) == []


def test_records_of_another_version_are_left_as_they_are(home: Path) -> None:
    with sqlite3.connect(home / "aenv.db") as raw:
        raw.execute(f"PRAGMA user_version={SCHEMA_VERSION - 1}")
    raw.close()
    assert isinstance(fault(fsck(home)), StoreFault)
    with sqlite3.connect(home / "aenv.db") as raw:
        assert raw.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION - 1,)
    raw.close()


def test_records_that_are_damaged(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    settings.database.write_bytes(b"no database" * 1000)
    assert isinstance(fault(fsck(tmp_path)), StoreCorrupt)
