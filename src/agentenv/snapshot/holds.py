"""Who needs a snapshot's files although its record may be deleted or changed."""

from __future__ import annotations

from collections.abc import Collection

from agentenv.snapshot.records import Snapshot


class Hold:
    """Keeps the files that a snapshot had when it was made, until released."""

    def __init__(self, holds: Holds, record: Snapshot, extra: Collection[str]) -> None:
        self._holds = holds
        self.record = record
        self.files = frozenset({*record.parts(), *extra})

    def release(self) -> None:
        """End it; repeatable."""
        self._holds.forget(self)


class Holds:
    """All holds of a node's life."""

    def __init__(self) -> None:
        self._all: set[Hold] = set()

    def take(self, record: Snapshot, extra: Collection[str] = ()) -> Hold:
        """A new hold of a snapshot, and of other files by name."""
        hold = Hold(self, record, extra)
        self._all.add(hold)
        return hold

    def forget(self, hold: Hold) -> None:
        """See Hold.release."""
        self._all.discard(hold)

    @property
    def ids(self) -> set[str]:
        """The snapshots held."""
        return {hold.record.id for hold in self._all}

    @property
    def files(self) -> set[str]:
        """The files held."""
        return {path for hold in self._all for path in hold.files}
