"""Chains are kept short in the background: nothing of their content changes, and nobody loses a file."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.config import Settings
from agentenv.errors import HostFault, StoreCorrupt, StoreFull
from agentenv.snapshot import folding
from agentenv.snapshot.chains import Limits, disk_fold, folded, memory_fold
from agentenv.snapshot.records import Attached, DiskLayer, Fold, Memory, MemoryDelta, Snapshot, StoredFile
from agentenv.snapshot.store import Snapshots
from agentenv.snapshot.upkeep import Upkeep
from agentenv.vmm.machine import Capture, Layer, MemoryImage
from agentenv.vmm.stored import digest_of
from agentenv.vmm.transfer import PAGE
from support.snapshots import PAGES, fill, names_below, read_disk, read_memory, record_of, write_disk

LIMITS = Limits(layers=4, delta_bytes=100 * PAGE, starts=3)


@pytest.fixture
async def upkeep(store: Snapshots) -> AsyncIterator[Upkeep]:
    upkeep = Upkeep(store, LIMITS)
    yield upkeep
    await upkeep.stop()


async def add(
    store: Snapshots, parent: Snapshot | None = None, *, number: int = 0, **fields: object
) -> Snapshot:
    """A snapshot that changed the page and the cluster `number`, to something of its own."""
    draft = store.begin("i1")
    fill(draft, flat=parent is None, page=number % PAGES)
    write_disk(draft.path / "disk", {number % 16: number % 255 + 1, (number + 1) % 16: 0})
    if parent is None:
        fields = {"kind": "template", **fields}
    return await store.publish(draft, record_of(draft, parent, **fields))  # type: ignore[arg-type]


async def chain(store: Snapshots, length: int) -> list[Snapshot]:
    """A template's snapshot, and so many above it, each above the one before."""
    made = [await add(store)]
    for number in range(1, length + 1):
        made.append(await add(store, made[-1], number=number))
    return made


def content(store: Snapshots, record: Snapshot) -> tuple[bytes, dict[int, int]]:
    """What a snapshot's memory and disk read."""
    assert record.memory is not None
    return read_memory(record.memory, store.home), read_disk(
        store.path(layer) for layer in record.disk if layer.format == "qcow2"
    )


async def until_idle(upkeep: Upkeep) -> None:
    while upkeep._task is not None and not upkeep.idle:
        await asyncio.wait({upkeep._task})


# Deciding


def memory_of(*deltas: int) -> Memory:
    return Memory(
        StoredFile("base", 1000), tuple(MemoryDelta(f"d{n}", size) for n, size in enumerate(deltas))
    )


@pytest.mark.parametrize(
    ("deltas", "starts", "expected"),
    [
        ((), 100, None),
        ((PAGE,), 2, None),
        ((PAGE,), 3, "flat"),
        ((0,), 3, None),
        ((PAGE,) * 4, 0, None),
        ((PAGE,) * 5, 0, "delta"),
        ((50 * PAGE, 50 * PAGE), 0, None),
        ((50 * PAGE, 51 * PAGE), 0, "flat"),
    ],
)
def test_what_becomes_of_a_memory(deltas: tuple[int, ...], starts: int, expected: str | None) -> None:
    assert memory_fold(memory_of(*deltas), starts, LIMITS) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), None),
        ((1, 1, 1, 1), None),
        ((1, 1, 1, 1, 1), 0),
        ((100, 1, 1, 1, 1), 1),
        ((100, 50, 1, 1, 1), 2),
        ((100, 50, 25, 12, 6), 2),  # enough become one, whatever they hold
        ((4, 1, 1, 1, 1), 0),
    ],
)
def test_which_layers_become_one(sizes: tuple[int, ...], expected: int | None) -> None:
    assert disk_fold(sizes, LIMITS) == expected


@given(st.lists(st.integers(1, 1 << 40), max_size=60))
def test_a_chain_that_grows_stays_bounded(added: list[int]) -> None:
    sizes: list[int] = []
    for size in added:
        sizes.append(size)
        if (first := disk_fold(sizes, Limits())) is not None:
            sizes[first:] = [sum(sizes[first:])]
        assert len(sizes) <= 16


def test_what_has_taken_the_place_of_others_is_found_in_turn() -> None:
    first, second = Fold("x", ("b", "c")), Fold("y", ("x", "d"))
    assert folded(["a", "b", "c", "d", "e"], [first, second]) == (("a", "y", "e"), (first, second))
    assert folded(["a", "x", "d", "e"], [first, second]) == (("a", "y", "e"), (second,))
    assert folded(["a", "b", "d"], [first, second]) == (("a", "b", "d"), ())
    assert folded([], [first]) == ((), ())


def test_the_limits_are_settings(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, fold_layers=3, fold_delta_mib=2, fold_starts=1, disk_floor_mib=5)
    assert Limits.of(settings) == Limits(3, 2 << 20, 1, 5 << 20)


# Folding


async def test_a_long_chain_becomes_a_short_one_of_the_same_content(store: Snapshots, upkeep: Upkeep) -> None:
    base, *above = await chain(store, 7)
    last = above[-1]
    before = content(store, last)
    made = await upkeep.fold(last.id)
    assert made is not None and made.memory is not None and last.memory is not None
    assert made == store.get(last.id)
    assert made.disk[:2] == base.disk == last.disk[:2]  # the image and the template's are everybody's
    assert len(made.disk) == 3
    assert made.memory.base == last.memory.base
    assert len(made.memory.deltas) == 1
    assert content(store, made) == before
    store.require_files(made)
    for each in above[:-1]:  # who shared the layers has them still
        store.require_files(each)
    assert await upkeep.fold(last.id) == made
    assert await upkeep.fold(above[2].id) == above[2]


async def test_the_layers_of_drives_become_one_as_well(store: Snapshots, upkeep: Upkeep, home: Path) -> None:
    image = DiskLayer("images/base.ext4", 7, format="raw")
    written: tuple[DiskLayer, ...] = (image,)
    last: Snapshot | None = None
    for number in range(6):
        draft = store.begin("i1")
        fill(draft, flat=last is None)
        for name in ("disk", "drive1"):
            write_disk(draft.path / name, {number: number + 1})
        written = (*written, draft.disk("drive1"))
        drives = (
            Attached("read", "i", "/mnt/read", (image,), 1),
            Attached("written", "i", "/mnt/written", written, 1, read_only=False),
        )
        last = await store.publish(draft, record_of(draft, last, drives=drives))
    assert last is not None
    made = await upkeep.fold(last.id)
    assert made is not None
    assert [len(disk) for disk in made.disks] == [2, 1, 2]
    assert made.drives[0] == last.drives[0]
    files = (store.path(layer) for layer in made.drives[1].disk[1:])
    assert read_disk(files) == {number: number + 1 for number in range(6)}
    digested = await upkeep.take_digests(made.id)
    assert digested is not None and all(file.digest for file in digested.own_files())
    for record in store.of_kinds(("checkpoint",)):
        if record.id != last.id:
            store.delete(record.id)
    await store.collect()
    store.require_files(digested)
    # What the machine captures next is above the short chains.
    draft = store.begin("i1")
    fill(draft, flat=False)
    write_disk(draft.path / "drive1", {9: 10})
    assert last.memory is not None
    image_of = MemoryImage(store.path(last.memory.base), (draft.path / "memory",))
    root = (*store.layers(last), Layer(draft.path / "disk", "qcow2"))
    chains = [store.drives(last.drives)[0].layers, store.drives(last.drives)[1].layers]
    chains[1] = (*chains[1], Layer(draft.path / "drive1", "qcow2"))
    capture = Capture(draft.path / "state", draft.path / "memory", 1, root[-1], image_of, root, tuple(chains))
    contents = store.describe(capture, digested)
    assert contents.drives == (made.drives[0].disk, (*digested.drives[1].disk, draft.disk("drive1")))


async def test_one_started_from_often_gets_a_flat_memory(store: Snapshots, upkeep: Upkeep) -> None:
    _, child, grand = await chain(store, 2)
    before = content(store, grand)
    upkeep.starts = {grand.id: 3}.get  # type: ignore[assignment]
    fork = store.update(replace(grand, kind="fork"))
    assert await upkeep.fold(grand.id) == fork  # from which nobody starts any more
    store.update(grand)
    made = await upkeep.fold(grand.id)
    assert made is not None and made.memory is not None
    assert made.memory.deltas == ()
    assert made.memory.base.bytes == PAGES * PAGE
    assert content(store, made) == before
    assert store.get(child.id) == child


async def test_the_layers_before_stay_while_somebody_runs_from_them(
    store: Snapshots, upkeep: Upkeep, home: Path
) -> None:
    base, child, grand = await chain(store, 2)
    running = store.keep(grand)
    upkeep.starts = lambda _: 3
    made = await upkeep.fold(grand.id)
    assert made is not None
    store.delete(base.id)
    store.delete(child.id)
    assert f"snapshots/{base.id}/memory" not in (await store.collect()).files
    running.release()
    assert f"snapshots/{base.id}/memory" in (await store.collect()).files
    store.require_files(made)
    assert {Path(path).name for path in names_below(home) if "memory" in path} == {
        Path(made.memory.base.path).name if made.memory else ""
    }


async def test_a_machine_that_goes_on_captures_above_what_took_its_layers_place(
    store: Snapshots, upkeep: Upkeep
) -> None:
    """It knows the layers that it was started from; the record has the short chain."""
    *_, last = await chain(store, 6)
    assert last.memory is not None
    saved, layers = store.saved(last), store.layers(last)
    assert saved is not None
    parent = await upkeep.fold(last.id)
    assert parent is not None
    for number in (7, 8):
        draft = store.begin("i1")
        fill(draft, flat=False, page=number)
        write_disk(draft.path / "disk", {number: number})
        image = MemoryImage(saved.memory.base, (*saved.memory.deltas, draft.path / "memory"))
        layers = (*layers, Layer(draft.path / "disk", "qcow2"))
        capture = Capture(draft.path / "state", draft.path / "memory", 1, layers[-1], image, layers)
        saved = capture.saved
        contents = store.describe(capture, parent)
        assert contents.memory.deltas[:-1] == (parent.memory.deltas if parent.memory else ())
        assert contents.disk[:-1] == parent.disk
        assert contents.folds == parent.folds
        record = replace(
            record_of(draft, last), disk=contents.disk, memory=contents.memory, folds=contents.folds
        )
        parent = await store.publish(draft, replace(record, parent=parent.id))
    memory, disk = content(store, parent)
    assert [memory[page * PAGE] for page in range(6, 10)] == [8, 9, 10, 1]
    assert (disk[7], disk[8]) == (7, 8)


async def test_a_deleted_one_is_folded_for_those_who_build_upon_it(store: Snapshots, upkeep: Upkeep) -> None:
    """As when a sandbox is resumed before what it was paused into was folded."""
    *_, last = await chain(store, 6)
    running = store.keep(last)
    store.delete(last.id)
    made = await upkeep.fold(last.id)
    assert made is not None
    assert len(made.disk) == 3
    assert made.deleted_at is not None
    running.release()
    assert await upkeep.fold(last.id) is None


async def test_what_was_captured_meanwhile_needs_no_fold_of_its_own(store: Snapshots, upkeep: Upkeep) -> None:
    *_, last = await chain(store, 6)
    child = await add(store, last, number=7)
    before = content(store, child)
    parent = await upkeep.fold(last.id)
    made = await upkeep.fold(child.id)
    assert parent is not None and made is not None and parent.memory is not None
    assert made.disk == (*parent.disk, child.disk[-1])
    assert made.memory is not None
    assert made.memory.deltas[0] == parent.memory.deltas[0]
    assert made.folds == parent.folds
    assert content(store, made) == before


async def test_in_the_background_all_is_done_and_told(store: Snapshots, upkeep: Upkeep) -> None:
    made = await chain(store, 6)
    changed: list[str] = []
    upkeep.start(starts=lambda _: 0, changed=changed.append)
    later = await add(store, made[-1], number=7)
    upkeep.look(later.id)
    upkeep.look("nobody")
    await until_idle(upkeep)
    assert set(changed) >= {made[5].id, made[6].id, later.id}
    for each in (*made, later):
        now = store.get(each.id)
        assert all(file.digest is not None for file in now.own_files())
        assert len(now.disk) <= 2 + LIMITS.layers
    assert store.check(digests=True) == ()


async def test_a_damaged_layer_changes_nothing(store: Snapshots, upkeep: Upkeep, home: Path) -> None:
    made = await chain(store, 6)
    before = names_below(home)
    os.truncate(home / "snapshots" / made[3].id / "memory", 5)
    with pytest.raises(StoreCorrupt):
        await upkeep.fold(made[6].id)
    os.truncate(home / "snapshots" / made[3].id / "disk", 100)
    with pytest.raises(StoreCorrupt):
        await upkeep.fold(made[5].id)
    (home / "snapshots" / made[2].id / "disk").unlink()
    with pytest.raises(StoreCorrupt, match="missing"):
        await upkeep.fold(made[5].id)
    before.remove(f"snapshots/{made[2].id}/disk")
    # Its disk was made one before its memory was found damaged.
    assert store.get(made[6].id).memory == made[6].memory
    assert store.get(made[5].id) == made[5]
    new = names_below(home) - before
    assert new == {store.get(made[6].id).disk[-1].path}


async def test_the_disk_is_not_filled_by_it(store: Snapshots, home: Path) -> None:
    made = await chain(store, 6)
    before = names_below(home)
    upkeep = Upkeep(store, replace(LIMITS, spare_bytes=1 << 60))
    with pytest.raises(StoreFull, match="stay so"):
        await upkeep.fold(made[6].id)
    with pytest.raises(StoreFull):
        await upkeep.flatten(made[6].id)
    assert names_below(home) == before
    assert store.get(made[6].id) == made[6]


async def test_one_that_is_stopped_leaves_nothing(
    store: Snapshots, upkeep: Upkeep, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await chain(store, 6)
    begun, before = asyncio.Event(), names_below(home)

    async def half(what: str, *, into: str = "", **work: object) -> object:
        if not into:
            return await folding.quietly(what, **work)
        Path(into).write_bytes(b"half of it")
        begun.set()
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr("agentenv.snapshot.upkeep.quietly", half)
    upkeep.start(starts=lambda _: 0, changed=lambda _: None)
    await begun.wait()
    assert len(names_below(home) - before) == 1
    await upkeep.stop()
    assert names_below(home) == before
    assert store.get(made[6].id) == made[6]
    upkeep.look(made[6].id)
    assert upkeep.idle


async def test_what_a_crash_left_is_collected(store: Snapshots, home: Path) -> None:
    made = await chain(store, 1)
    left = home / "snapshots" / made[1].id / "disk-0badcafe"
    left.write_bytes(b"half of it")
    assert (await store.collect()).files == (str(left.relative_to(home)),)


# The program


async def test_a_program_that_is_not_waited_for_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    task = asyncio.create_task(folding.quietly("digests", files=[]))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        await asyncio.sleep(0.01)
    pid = int((tmp_path / "pid").read_text())
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not Path(f"/proc/{pid}").exists()
    program.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    with pytest.raises(HostFault, match="3: broken"):
        await folding.quietly("digests", files=[])


async def test_digests_are_of_the_content(store: Snapshots, upkeep: Upkeep, home: Path) -> None:
    _, added = await chain(store, 1)
    child = await upkeep.take_digests(added.id)
    assert child is not None and child.memory is not None
    assert store.get(child.id) == child
    place = home / "snapshots" / child.id
    assert child.memory.deltas[0].digest == digest_of(place / "memory", place / "memory.map")
    assert child.disk[-1].digest == digest_of(place / "disk")
    assert child.disk[0].digest is None  # not its own
    assert store.check(digests=True) == ()
    (place / "disk").write_bytes(b"y" * child.disk[-1].bytes)
    assert store.check() == ()
    (problem,) = store.check(digests=True)
    assert (problem.path, problem.snapshots) == (f"snapshots/{child.id}/disk", (child.id,))
    (place / "state").unlink()
    store.update(replace(store.get(child.id), state=replace(child.state, digest=None)))  # type: ignore[type-var]
    with pytest.raises(StoreCorrupt, match="is missing"):
        await upkeep.take_digests(child.id)
