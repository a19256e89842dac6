"""The audit log's files: lines that can be read, turned over, bounded, and all there after a stop."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import HostFault
from agentenv.identity import audit
from agentenv.identity.audit import Audit


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_was_noted_is_there_after_a_stop(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = Audit(path, file_bytes=1 << 20, files=2)
    for number in range(500):
        log.note(key="alice", target={"sandbox_id": f"i{number}"}, status=204, nothing=None)
    log.close()
    found = lines(path)
    assert [each["target"]["sandbox_id"] for each in found] == [f"i{number}" for number in range(500)]
    assert set(found[0]) == {"time", "key", "target", "status"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_life_goes_on_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    for number in range(2):
        log = Audit(path, file_bytes=1 << 20, files=2)
        log.note(number=number)
        log.close()
    assert [each["number"] for each in lines(path)] == [0, 1]


def test_files_are_turned_over_and_few(tmp_path: Path) -> None:
    log = Audit(tmp_path / "audit.log", file_bytes=2000, files=2)
    for number in range(300):
        log.note(number=number, text="x" * 50)
    log.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["audit.log", "audit.log.1", "audit.log.2"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    assert lines(tmp_path / "audit.log")[-1]["number"] == 299


def test_strange_words_stay_on_their_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = Audit(path, file_bytes=1 << 20, files=1)
    log.note(key='a"b\n{"key": "root"}\ud800', status=200)
    log.close()
    (found,) = lines(path)
    assert found["key"] == 'a"b\n{"key": "root"}\ud800'


def test_a_disk_that_stands_still_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "WAITING_MOST", 10)
    path = tmp_path / "audit.log"
    log = Audit(path, file_bytes=1 << 20, files=1)
    going, emit = threading.Event(), log._handler.emit

    def stuck(record: Any) -> None:
        going.wait()
        emit(record)

    monkeypatch.setattr(log._handler, "emit", stuck)
    for number in range(100):
        log.note(number=number)
    going.set()
    while not log._queue.empty():
        threading.Event().wait(0.01)
    log.note(number=100)
    log.close()
    found = lines(path)
    assert found[-1]["number"] == 100
    assert found[-1]["lost_before"] == 100 - (len(found) - 1) > 80


def test_a_file_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "audit.log").mkdir()
    with pytest.raises(HostFault, match="audit log"):
        Audit(tmp_path / "audit.log", file_bytes=1, files=1)
