"""Who descends from whom. Deleted snapshots are passed over: a grandchild becomes a child."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentenv.snapshot.records import Snapshot


@dataclass(frozen=True)
class Lineage:
    """A snapshot's nearest relatives; children oldest first."""

    snapshot: Snapshot
    parent: Snapshot | None
    children: tuple[Snapshot, ...]


@dataclass(frozen=True)
class Branch:
    """A snapshot and what grew from it, oldest first."""

    snapshot: Snapshot
    children: tuple[Branch, ...]


def lineage(snapshot: Snapshot, records: Iterable[Snapshot]) -> Lineage:
    """The relatives of a snapshot among all records, deleted ones included."""
    known = {record.id: record for record in records}
    children = (
        each for each in known.values() if each.deleted_at is None and _parent_id(each, known) == snapshot.id
    )
    return Lineage(snapshot, _parent(snapshot, known), tuple(sorted(children, key=_age)))


def tree(sandbox_id: str, records: Iterable[Snapshot]) -> tuple[Branch, ...]:
    """The snapshots taken of a sandbox, as branches: those whose parent is not one of them come first,
    and name what it is."""
    known = {record.id: record for record in records}
    members = sorted(
        (each for each in known.values() if each.sandbox_id == sandbox_id and each.deleted_at is None),
        key=_age,
    )
    below: dict[str | None, list[Snapshot]] = {}
    ids = {each.id for each in members}
    for each in members:
        parent = _parent_id(each, known)
        below.setdefault(parent if parent in ids else None, []).append(each)
    from_roots = list(below.get(None, []))
    for each in from_roots:  # grows while it is walked
        from_roots.extend(below.get(each.id, []))
    grown: dict[str, Branch] = {}
    for each in reversed(from_roots):
        grown[each.id] = Branch(each, tuple(grown[child.id] for child in below.get(each.id, [])))
    return tuple(grown[each.id] for each in below.get(None, []))


def _parent(snapshot: Snapshot, known: dict[str, Snapshot]) -> Snapshot | None:
    passed = {snapshot.id}
    above = known.get(snapshot.parent or "")
    while above is not None and above.deleted_at is not None and above.id not in passed:
        passed.add(above.id)
        above = known.get(above.parent or "")
    return None if above is None or above.id in passed else above


def _parent_id(snapshot: Snapshot, known: dict[str, Snapshot]) -> str | None:
    parent = _parent(snapshot, known)
    return None if parent is None else parent.id


def _age(snapshot: Snapshot) -> tuple[float, str]:
    return snapshot.created_at, snapshot.id
