"""What is decided of snapshots without touching a file: records, names, lists, descent, what can go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import InvalidRequest, StoreCorrupt
from agentenv.snapshot.collection import plan
from agentenv.snapshot.lineage import Branch, lineage, tree
from agentenv.snapshot.listing import Query, select
from agentenv.snapshot.names import canonical, matches, untagged
from agentenv.snapshot.records import (
    Descent,
    DiskLayer,
    GuestSettings,
    Memory,
    MemoryDelta,
    Resources,
    Snapshot,
    StoredFile,
    decode,
    encode,
    mismatches,
    new_snapshot_id,
)


def snapshot(id: str, parent: Snapshot | None = None, **fields: object) -> Snapshot:
    below = parent.disk if parent else (DiskLayer("images/x.ext4", 1, format="raw"),)
    deltas = parent.memory.deltas if parent and parent.memory else ()
    memory = Memory(
        StoredFile("snapshots/root/memory", 8), (*deltas, MemoryDelta(f"snapshots/{id}/memory", 4))
    )
    made = Snapshot(
        id=id,
        kind="checkpoint",
        template=Descent("t", "base", "b"),
        resources=Resources(1, 512, 2048),
        disk=(*below, DiskLayer(f"snapshots/{id}/disk", 2)),
        memory=memory,
        state=StoredFile(f"snapshots/{id}/state", 3),
        created_at=1000.0,
        parent=parent.id if parent else None,
        sandbox_id="i1",
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def test_a_record_is_read_back_with_its_types() -> None:
    made = snapshot(
        "s1",
        guest=GuestSettings({"A": "b"}, "root", "/"),
        fingerprint={"qemu": "10.0"},
        durable=True,
        expires_at=5.5,
        names=("a:b",),
    )
    back = decode(encode(made))
    assert back == made
    assert type(back.disk[0]) is DiskLayer
    assert back.memory is not None
    assert type(back.memory.deltas[0]) is MemoryDelta
    assert decode(encode(replace(made, memory=None, state=None))).memory is None


@pytest.mark.parametrize("document", ["", "{}", "[]", '{"id": "s1"}'])
def test_what_is_no_record_is_refused(document: str) -> None:
    with pytest.raises(StoreCorrupt):
        decode(document)


def test_ids_differ_and_can_be_names() -> None:
    ids = {new_snapshot_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(canonical(each) == f"{each}:default" for each in ids)


def test_files_of_a_snapshot() -> None:
    made = snapshot("s2", snapshot("s1"))
    assert made.own_parts() == {
        "snapshots/s2/disk",
        "snapshots/s2/memory",
        "snapshots/s2/memory.map",
        "snapshots/s2/state",
    }
    assert made.parts() - made.own_parts() == {
        "images/x.ext4",
        "snapshots/s1/disk",
        "snapshots/s1/memory",
        "snapshots/s1/memory.map",
        "snapshots/root/memory",
    }
    assert made.added_bytes == 9


def test_in_what_a_host_differs() -> None:
    recorded = {"qemu": "10.0", "cpu": "max", "kernel": "a"}
    assert mismatches(recorded, dict(recorded)) == ()
    assert mismatches(recorded, {"qemu": "10.1", "cpu": "max", "tsc": "1"}) == (
        "kernel: a in the snapshot, nothing here",
        "qemu: 10.0 in the snapshot, 10.1 here",
        "tsc: nothing in the snapshot, 1 here",
    )


@pytest.mark.parametrize(
    ("name", "whole"),
    [("a", "a:default"), ("a:v1", "a:v1"), ("ns/a", "ns/a:default"), ("Ns/a.b-c_d:1.0", "Ns/a.b-c_d:1.0")],
)
def test_names_with_and_without_tags(name: str, whole: str) -> None:
    assert canonical(name) == whole
    assert canonical(whole) == whole
    assert matches(whole, untagged(whole))
    assert matches(whole, whole)
    assert not matches(whole, untagged(whole) + "x")


@pytest.mark.parametrize("name", ["", ":", "a:", ":a", "/a", "a/", "a/b/c", "a:b:c", "a b", "-a", "ä", "a\n"])
def test_what_cannot_be_a_name(name: str) -> None:
    with pytest.raises(InvalidRequest):
        canonical(name)


def test_a_list_is_filtered() -> None:
    one = snapshot("s1", names=("a:default", "ns/b:v1"))
    records = [
        one,
        snapshot("s2", sandbox_id="i2"),
        snapshot("s3", kind="pause"),
        snapshot("s4", deleted_at=1.0),
    ]

    def ids(query: Query) -> set[str]:
        return {each.id for each in select(records, query).snapshots}

    assert ids(Query()) == {"s1", "s2"}
    assert ids(Query(sandbox_id="i1")) == {"s1"}
    assert ids(Query(kinds=frozenset({"pause"}))) == {"s3"}
    for name in ("a", "a:default", "ns/b", "ns/b:v1", "s1", "s1:default"):
        assert ids(Query(name=name)) == {"s1"}, name
    for name in ("b", "a:v1", "ns/b:v2", "s4", ""):
        assert ids(Query(name=name)) == set(), name


@given(
    times=st.lists(st.floats(0, 10, allow_nan=False), max_size=30),
    limit=st.integers(1, 7),
)
def test_pages_together_are_the_list(times: list[float], limit: int) -> None:
    records = [snapshot(f"s{number}", created_at=at) for number, at in enumerate(times)]
    whole = select(records, Query(limit=None))
    assert whole.next_token is None
    assert [each.created_at for each in whole.snapshots] == sorted(times, reverse=True)
    paged: list[Snapshot] = []
    token = None
    while True:
        page = select(records, Query(limit=limit, token=token))
        paged += page.snapshots
        token = page.next_token
        if token is None:
            break
        assert len(page.snapshots) == limit
    assert tuple(paged) == whole.snapshots


@pytest.mark.parametrize("token", ["x", "!", "bnVsbA", "W10"])
def test_tokens_of_others_are_refused(token: str) -> None:
    with pytest.raises(InvalidRequest):
        select([], Query(token=token))


def test_descent_passes_over_deleted_ones() -> None:
    root = snapshot("root", kind="template", sandbox_id=None)
    one = snapshot("s1", root, created_at=1.0)
    two = snapshot("s2", one, created_at=2.0, deleted_at=9.0)
    three = snapshot("s3", two, created_at=3.0)
    four = snapshot("s4", two, created_at=0.5)  # the clock went back
    other = snapshot("s5", one, created_at=5.0, sandbox_id="i2")
    lost = replace(snapshot("s6", created_at=6.0), parent="gone")
    records = [three, lost, root, four, two, one, other]
    found = lineage(one, records)
    assert found.parent == root
    assert found.children == (four, three, other)
    assert lineage(three, records).parent == one
    assert lineage(lost, records).parent is None
    assert tree("i1", records) == (
        Branch(one, (Branch(four, ()), Branch(three, ()))),
        Branch(lost, ()),
    )
    assert tree("i2", records) == (Branch(other, ()),)
    assert tree("i3", records) == ()


def test_a_circle_of_parents_ends() -> None:
    one = replace(snapshot("s1", deleted_at=1.0), parent="s2")
    two = replace(snapshot("s2", deleted_at=1.0), parent="s1")
    three = snapshot("s3", one)
    assert lineage(three, [one, two, three]).parent is None


def test_a_long_chain_has_its_tree() -> None:
    chain = [snapshot("s0")]
    for number in range(1, 1500):
        chain.append(replace(chain[0], id=f"s{number}", parent=f"s{number - 1}", created_at=1000.0 + number))
    (branch,) = tree("i1", chain)
    for number in range(1, 1500):
        (branch,) = branch.children
        assert branch.snapshot.id == f"s{number}"


@given(data=st.data())
def test_nothing_needed_goes_and_nothing_unneeded_stays(data: st.DataObject) -> None:
    records: list[Snapshot] = []
    for number in range(data.draw(st.integers(1, 7))):
        parent = data.draw(st.sampled_from([None, *records]))
        deleted = data.draw(st.sampled_from([None, 5.0]))
        records.append(replace(snapshot(f"s{number}", parent), deleted_at=deleted))
    in_use = {record.id for record in records if data.draw(st.booleans())}
    present = {part: 10 for record in records for part in record.own_parts()}
    kept = set(data.draw(st.lists(st.sampled_from(sorted(present)), max_size=2)))
    found = plan(records, in_use, kept, present)
    living = [record for record in records if record.deleted_at is None or record.id in in_use]
    needed = kept.union(*(record.parts() for record in living))
    assert set(found.files) == set(present) - needed
    assert found.bytes == 10 * len(found.files)
    left = {path.split("/")[1] for path in set(present) - set(found.files)}
    assert set(found.records) == {record.id for record in records} - left - {each.id for each in living}
