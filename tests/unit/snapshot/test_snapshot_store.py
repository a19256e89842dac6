"""Snapshots are whole or not there, and go when nobody needs them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.errors import Conflict, NotFound, StoreCorrupt, StoreFault, StoreFull
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.snapshot import files
from agentenv.snapshot.store import Snapshots
from agentenv.vmm.machine import Capture, Layer, MemoryImage, SavedState
from agentenv.vmm.transfer import PAGE
from support.snapshots import PAGES, add, fill, names_below, record_of

DOOMED = Path(__file__).parents[2] / "support" / "doomed_publish.py"


def reopened(database: Database, home: Path) -> Snapshots:
    return Snapshots(database, Ledger(database), home)


async def test_a_snapshot_is_found_again_as_it_was(store: Snapshots, database: Database, home: Path) -> None:
    made = await add(store, fingerprint={"qemu": "10.0"}, names=("mine:v1", "mine:default"))
    again = reopened(database, home)
    found = again.get(made.id)
    assert found == replace(made, names=("mine:default", "mine:v1"))
    for name in (f"{made.id}:default", "mine", "mine:v1", "mine:default"):
        assert again.find(name) == found
    for name in ("mine:v2", "other", "not a name!", f"{made.id}:v1"):
        assert again.find(name) is None
    with pytest.raises(NotFound):
        again.get("other")
    again.require_files(found)
    assert Ledger(database).entries() == []
    assert again.check(digests=True) == ()


async def test_sizes_are_those_of_the_files(store: Snapshots, home: Path) -> None:
    made = await add(store)
    child = await add(store, made, page=3)
    assert made.memory is not None
    assert made.memory.base.bytes == PAGES * PAGE
    assert child.added_bytes == PAGE + len("device state") + 100 * len(child.id)
    assert {store.path(file) for file in child.own_files()} == {
        home / "snapshots" / child.id / name for name in ("state", "memory", "disk")
    }
    with pytest.raises(StoreFault):
        store.users_of(Path("/etc/passwd"))


async def test_a_capture_becomes_a_record_and_what_a_machine_is_restored_from(
    store: Snapshots, home: Path
) -> None:
    parent = await add(store)
    parent = store.update(replace(parent, state=replace(parent.state, digest="sha256:0")))  # type: ignore[type-var]
    saved = store.saved(parent)
    assert saved is not None
    draft = store.begin("i1")
    fill(draft, flat=False, page=2)
    image = MemoryImage(saved.memory.base, (draft.path / "memory",))
    layers = (*store.layers(parent), Layer(draft.path / "disk", "qcow2"))
    capture = Capture(draft.path / "state", draft.path / "memory", 1, layers[-1], image, layers)
    contents = store.describe(capture, parent)
    expected = record_of(draft, parent)
    assert (contents.disk, contents.memory, contents.state) == (
        expected.disk,
        expected.memory,
        expected.state,
    )
    made = await store.publish(draft, expected)
    assert store.layers(made) == layers
    assert store.saved(made) == SavedState(capture.device_state, image)
    assert store.saved(replace(made, memory=None)) is None
    elsewhere = replace(capture, device_state=Path("/nowhere/state"))
    with pytest.raises(StoreFault, match="data directory"):
        store.describe(elsewhere)
    (draft.path / "memory").unlink()
    with pytest.raises(StoreCorrupt, match="missing"):
        store.describe(capture)


async def test_a_draft_that_is_given_up_leaves_nothing(
    store: Snapshots, database: Database, home: Path
) -> None:
    draft = store.begin("i1")
    elsewhere = home / "sealed"
    elsewhere.write_bytes(b"layer")
    draft.take(elsewhere, "disk")
    await store.abandon(draft)
    await store.abandon(draft)
    assert list((home / "snapshots").iterdir()) == []
    assert Ledger(database).entries() == []
    assert elsewhere.read_bytes() == b"layer"


async def test_giving_up_what_was_published_does_nothing(store: Snapshots) -> None:
    draft = store.begin("i1")
    fill(draft, flat=True)
    made = await store.publish(draft, record_of(draft))
    await store.abandon(draft)
    store.require_files(made)


async def test_a_draft_without_its_files_has_no_record(store: Snapshots) -> None:
    draft = store.begin("i1")
    with pytest.raises(StoreCorrupt, match="has no disk"):
        draft.disk()
    (draft.path / "memory").write_bytes(b"x" * PAGE)
    with pytest.raises(StoreCorrupt, match=r"has no memory\.map"):
        draft.memory_delta()


async def test_a_name_goes_over_to_the_newer_snapshot(store: Snapshots) -> None:
    first = await add(store, names=("mine:default", "mine:v1"))
    second = await add(store, names=("mine:default",))
    assert store.get("mine").id == second.id
    assert store.get("mine:v1").id == first.id
    assert store.get(first.id).names == ("mine:v1",)


async def test_a_template_s_name_is_refused_and_nothing_is_left(
    store: Snapshots, database: Database, home: Path
) -> None:
    with database.transaction() as cursor:
        cursor.execute("INSERT INTO templates VALUES ('t1', 'base', 1, 0)")
    with pytest.raises(Conflict, match="template"):
        await add(store, names=("base:mine",))
    assert names_below(home) == set()
    assert Ledger(database).entries() == []
    assert store.check() == ()


async def test_the_first_snapshot_of_a_build(store: Snapshots) -> None:
    await add(store)
    assert store.of_build("b1") is None
    old = await add(store, kind="template", created_at=1.0)
    new = await add(store, kind="template", created_at=2.0)
    assert store.of_build("b1") == new
    store.delete(new.id)
    assert store.of_build("b1") == old
    assert store.of_build("b2") is None


async def test_deleting_keeps_layers_that_others_need(store: Snapshots, home: Path) -> None:
    base = await add(store, names=("base2:default",))
    child = await add(store, base, page=1)
    assert store.delete(base.id)
    assert not store.delete(base.id)
    assert store.find(base.id) is None
    assert store.find("base2") is None
    dry = await store.collect(dry_run=True)
    assert dry.files == (f"snapshots/{base.id}/state",)
    assert f"snapshots/{base.id}/state" in names_below(home)
    done = await store.collect()
    assert done == dry
    assert done.bytes > 0
    assert done.records == ()
    store.require_files(child)
    assert store.check(digests=True) == ()
    store.delete(child.id)
    assert set((await store.collect()).records) == {base.id, child.id}
    assert list((home / "snapshots").iterdir()) == []
    assert (home / "images" / "base.ext4").exists()
    assert (await store.collect()).files == ()


async def test_what_is_held_stays(store: Snapshots) -> None:
    base = await add(store)
    with store.hold(base.id) as held:
        store.delete(base.id)
        assert (await store.collect()).files == ()
        store.require_files(held)
        again = store.keep(held)
    assert (await store.collect(dry_run=True)).files == ()
    again.release()
    again.release()
    assert (await store.collect(in_use=[base.id])).files == ()
    assert len((await store.collect()).files) == 3
    with pytest.raises(NotFound), store.hold(base.id):
        pass


async def test_a_durable_snapshot_syncs_the_ones_below(
    store: Snapshots, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    original = files.sync

    def noting(paths: list[Path]) -> None:
        synced.extend(paths)
        original(paths)

    monkeypatch.setattr(files, "sync", noting)
    soft = await add(store)
    assert synced == []
    firm = await add(store, soft, durable=True)
    names = {str(path.relative_to(home / "snapshots")) for path in synced}
    assert {f"{soft.id}/memory", f"{soft.id}/disk", soft.id, f"{firm.id}/memory.map", "."} <= names
    synced.clear()
    await add(store, firm, durable=True)
    assert not any(firm.id in str(path) for path in synced)
    assert not store.get(soft.id).durable
    assert (await store.make_durable(soft.id)).durable
    assert store.get(soft.id).durable


async def test_nothing_is_left_of_a_snapshot_that_is_not_as_durable_as_was_asked(
    store: Snapshots, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was captured to end shares its files with the capture, and must go on."""

    def refuse(_: Database) -> None:
        raise StoreFull("no space for the log")

    draft = store.begin("i1")
    fill(draft, flat=True)
    shared = draft.path / "disk"
    os.link(shared, home / "of the machine")
    monkeypatch.setattr(Database, "sync", refuse)
    with pytest.raises(StoreFull):
        await store.publish(draft, record_of(draft, names=("kept:default",)), durable=True)
    await store.abandon(draft)
    assert store.recorded(draft.id) is None
    assert store.find("kept") is None
    assert not draft.path.exists()
    assert (home / "of the machine").stat().st_nlink == 1
    assert (await store.collect()).files == ()


async def test_damage_is_found_and_use_refused(store: Snapshots, home: Path) -> None:
    base = await add(store)
    child = await add(store, base, page=1)
    (home / "snapshots" / base.id / "disk").unlink()
    os.truncate(home / "snapshots" / child.id / "memory", 5)
    (home / "snapshots" / child.id / "memory.map").write_bytes(b"?")
    (home / "snapshots" / "left").mkdir()
    found = {problem.path: problem for problem in store.check(digests=True)}
    assert set(found) == {f"snapshots/{base.id}/disk", f"snapshots/{child.id}/memory", "snapshots/left"}
    assert set(found[f"snapshots/{base.id}/disk"].snapshots) == {base.id, child.id}
    assert "is missing" in found[f"snapshots/{base.id}/disk"].what
    assert "has 5 bytes" in found[f"snapshots/{child.id}/memory"].what
    for record in (base, child):
        with pytest.raises(StoreCorrupt, match="is missing"):
            store.require_files(record)
    (home / "snapshots" / child.id / "memory").write_bytes(b"x" * PAGE)
    assert f"snapshots/{child.id}/memory" in {problem.path for problem in store.check(digests=True)}


async def test_who_needs_an_image(store: Snapshots, home: Path) -> None:
    base = await add(store)
    child = await add(store, base)
    assert set(store.users_of(home / "images" / "base.ext4")) == {base.id, child.id}
    store.delete(base.id)
    store.delete(child.id)
    await store.collect()
    assert store.users_of(home / "images" / "base.ext4") == ()


async def test_expired_ones(store: Snapshots) -> None:
    never, soon = await add(store), await add(store, expires_at=50.0)
    assert [record.id for record in store.expired(50.0)] == [soon.id]
    store.update(replace(never, expires_at=40.0))
    assert len(store.expired(50.0)) == 2
    store.delete(soon.id)
    assert [record.id for record in store.expired(50.0)] == [never.id]


async def test_a_record_that_is_gone_cannot_be_replaced(store: Snapshots) -> None:
    made = await add(store)
    store.delete(made.id)
    await store.collect()
    with pytest.raises(StoreFault):
        store.update(made)
    with pytest.raises(NotFound):
        await store.make_durable(made.id)


async def test_a_cancelled_publish_is_finished(store: Snapshots) -> None:
    draft = store.begin("i1")
    fill(draft, flat=True)
    task = asyncio.create_task(store.publish(draft, record_of(draft), durable=True))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.get(draft.id).durable
    assert store.check() == ()


async def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """The database has no room for the record, and the files go."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], check=True)
    try:
        database = Database(place / "aenv.db")
        store = Snapshots(database, ledger := Ledger(database), place)
        draft = store.begin("i1")
        fill(draft, flat=True)
        record = record_of(draft)
        filler = place / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        long = replace(record, fingerprint={"x": "y" * 200_000})
        with pytest.raises(StoreFull):
            await store.publish(draft, long)
        assert names_below(place) == set()
        filler.unlink()
        await store.reap()
        assert ledger.entries() == []
        await add(store)
        database.close()
    finally:
        subprocess.run(["umount", str(place)], check=True)


STEPS = [
    ("agentenv.records.ledger:Ledger.record", "before", 1, False),
    ("agentenv.records.ledger:Ledger.record", "after", 1, False),
    ("pathlib:Path.mkdir", "after", 2, False),
    ("support.snapshots:fill", "after", 1, False),
    ("agentenv.snapshot.files:sync", "after", 1, False),
    ("os:fsync", "before", 3, False),
    ("agentenv.snapshot.table:_refuse_template", "before", 1, False),
    ("agentenv.snapshot.table:Table.insert", "after", 1, True),
    ("agentenv.records.database:Database.sync", "after", 1, True),
]


@pytest.mark.parametrize(("target", "when", "count", "whole"), STEPS)
async def test_a_node_that_dies_leaves_all_or_nothing(
    home: Path, target: str, when: str, count: int, whole: bool
) -> None:
    done = subprocess.run(
        [sys.executable, str(DOOMED), str(home), target, when, str(count)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-9, "", "")
    database = Database(home / "aenv.db")
    store = Snapshots(database, ledger := Ledger(database), home)
    await store.reap()
    assert ledger.entries() == []
    assert store.check(digests=True) == ()
    found = store.find("mine")
    assert (found is not None) == whole
    if found is None:
        assert not (home / "snapshots").exists() or list((home / "snapshots").iterdir()) == []
    else:
        store.require_files(found)
        assert found.durable
    await add(store, names=("mine:default",))
    database.close()


async def test_a_node_that_lives_answers(home: Path) -> None:
    """The dying ones above die where they should: the same program comes to its end otherwise."""
    done = subprocess.run(
        [sys.executable, str(DOOMED), str(home), "agentenv.snapshot.files:sync", "after", "99"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    database = Database(home / "aenv.db")
    assert Snapshots(database, Ledger(database), home).get("mine").id == done.stdout.strip()
    database.close()
