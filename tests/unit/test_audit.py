"""The audit of the host sees what is left behind, and nothing of others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import audit
from agentenv.config import Settings
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    made = Settings(home=tmp_path / "home", runtime=tmp_path / "run")
    made.runtime_dir.mkdir()
    database = Database(made.database)
    yield made
    database.close()


def remaining(before: audit.Things, scope: audit.Scope) -> list[str]:
    return audit.settle(before, scope, 0)


def test_nothing_happened(settings: Settings) -> None:
    scope = audit.Scope.of(settings)
    assert remaining(audit.snapshot(scope), scope) == []


def test_files_of_machines_count_and_a_new_node_does_not(settings: Settings) -> None:
    scope = audit.Scope.of(settings)
    before = audit.snapshot(scope)
    (settings.runtime_dir / "node.json").write_text("{}")
    (settings.home / "node.log").write_text("started")
    assert remaining(before, scope) == []
    disk = settings.machines_dir / "m1" / "disk.qcow2"
    disk.parent.mkdir(parents=True)
    disk.write_bytes(b"")
    assert remaining(before, scope) == [
        f"+ file {disk.parent}: a machine's directory",
        f"+ file {disk}: a file",
    ]
    before = audit.snapshot(scope)
    (settings.runtime_dir / "node.json").unlink()
    assert remaining(before, scope) == [f"- node file {settings.runtime_dir}/node.json: a file"]


def test_a_process_counts_for_its_home_and_for_everyone(settings: Settings, tmp_path: Path) -> None:
    ours, all_of_them = audit.Scope.of(settings), audit.Scope((), (), everyone=True)
    others = audit.Scope((tmp_path / "another",), ())
    scopes = (ours, all_of_them, others)
    before = [audit.snapshot(scope) for scope in scopes]
    environment = {"AENV_HOME": str(settings.home), "AENV_MACHINE": "x", "PATH": os.defpath}
    with subprocess.Popen(["sleep", "60"], env=environment) as child:
        appeared = [audit.diff(old, audit.snapshot(scope)) for old, scope in zip(before, scopes, strict=True)]
        child.kill()
    assert any(line.startswith(f"+ process {child.pid}:") for line in appeared[0])
    assert any(line.startswith(f"+ process {child.pid}:") for line in appeared[1])
    assert not any(str(child.pid) in line for line in appeared[2])


def test_records_count_but_the_node_s_own_do_not(settings: Settings) -> None:
    scope = audit.Scope.of(settings)
    before = audit.snapshot(scope)
    database = Database(settings.database)
    ledger = Ledger(database)
    ledger.record("node", "network", "aenv7")
    ledger.record("m1", "slot", "aenv7-1")
    database.close()
    assert remaining(before, scope) == [f"+ record slot aenv7-1: of m1, in {settings.database}"]


def test_homes_below_a_directory_are_found_when_they_appear(tmp_path: Path) -> None:
    scope = audit.Scope((tmp_path,), ())
    before = audit.snapshot(scope)
    database = Database(tmp_path / "later" / "aenv.db")
    Ledger(database).record("m1", "cgroup", "aenv-0-m1")
    assert [line.split(":")[0] for line in remaining(before, scope)] == ["+ record cgroup aenv-0-m1"]
    database.close()


def test_changes_are_told_with_both_states() -> None:
    assert audit.diff({"node table": {"t": "a"}}, {"node table": {"t": "b"}}) == ["~ node table t: a -> b"]


@pytest.mark.skipif(os.geteuid() != 0, reason="making namespaces needs root")
def test_namespaces_and_links_are_seen() -> None:
    scope = audit.Scope((), (), everyone=True)
    name = f"aenv{900 + os.getpid() % 90}-1"
    before = audit.snapshot(scope)
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "link", "add", name, "type", "veth", "peer", "aenvpeer"], check=True)
        lines = audit.diff(before, audit.snapshot(scope))
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)
        subprocess.run(["ip", "link", "del", name], check=False)
    kinds = {line.split()[1] for line in lines if name in line}
    assert kinds == {"namespace", "link", "mount"}
