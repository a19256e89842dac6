"""What steps of builds led to, kept under their keys to be gone on from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from agentenv.errors import StoreCorrupt
from agentenv.records.database import Database
from agentenv.snapshot import keeping
from agentenv.snapshot.records import Snapshot
from agentenv.snapshot.store import Snapshots

log = logging.getLogger(__name__)


class StepCache:
    """The snapshots of steps by key. What is removed here goes when nothing else rests on it; `collect` is
    called to have that looked at."""

    def __init__(
        self,
        database: Database,
        snapshots: Snapshots,
        collect: Callable[[], None],
        *,
        budget_mib: int,
        keep_s: float,
    ) -> None:
        self._database = database
        self._snapshots = snapshots
        self._collect = collect
        self._budget = budget_mib << 20
        self._keep_s = keep_s

    def find(self, key: str) -> Snapshot | None:
        """The snapshot under a key, which counts as used now; None if there is none that is whole."""
        rows = self._database.query("SELECT snapshot FROM steps WHERE key = ?", (key,))
        if not rows:
            return None
        found = self._snapshots.recorded(rows[0]["snapshot"])
        try:
            if found is None or found.deleted_at is not None:
                raise StoreCorrupt(f"the snapshot {rows[0]['snapshot']} is gone")
            self._snapshots.require_files(found)
        except StoreCorrupt as error:
            log.warning("a step that was kept is made anew: %s", error)
            self.forget(key)
            return None
        with self._database.transaction() as cursor:
            cursor.execute("UPDATE steps SET used_at = ? WHERE key = ?", (time.time(), key))
        return found

    def put(self, key: str, snapshot: Snapshot) -> None:
        """Keep a snapshot under a key, in the place of what was there."""
        before = self._database.query("SELECT snapshot FROM steps WHERE key = ?", (key,))
        with self._database.transaction() as cursor:
            cursor.execute(
                "INSERT INTO steps (key, snapshot, used_at) VALUES (?1, ?2, ?3)"
                " ON CONFLICT (key) DO UPDATE SET snapshot = ?2, used_at = ?3",
                (key, snapshot.id, time.time()),
            )
        for row in before:
            if row["snapshot"] != snapshot.id:
                self._drop(row["snapshot"])

    def forget(self, key: str) -> None:
        """Keep nothing under a key any more."""
        rows = self._database.query("SELECT snapshot FROM steps WHERE key = ?", (key,))
        with self._database.transaction() as cursor:
            cursor.execute("DELETE FROM steps WHERE key = ?", (key,))
        for row in rows:
            self._drop(row["snapshot"])

    def _drop(self, snapshot_id: str) -> None:
        """Delete a snapshot that no key has any more: the last step of a build may have two."""
        if not self._database.query("SELECT 1 FROM steps WHERE snapshot = ?", (snapshot_id,)):
            self._snapshots.delete(snapshot_id)
            self._collect()

    def trim(self, now: float) -> int:
        """Let go of what is too much or too old, the longest unused first; returns how many steps."""
        rows = self._database.query("SELECT key, snapshot, used_at FROM steps")
        kept = [keeping.Kept(row["key"], self._bytes(row["snapshot"]), row["used_at"]) for row in rows]
        gone = keeping.excess(kept, self._budget, self._keep_s, now)
        for each in gone:
            self.forget(each.key)
        return len(gone)

    def _bytes(self, snapshot_id: str) -> int:
        record = self._snapshots.recorded(snapshot_id)
        return 0 if record is None else keeping.bytes_added(self._snapshots.home, record)

    def drop_orphans(self) -> None:
        """Delete snapshots of steps that a crash left without a key. At a node's start."""
        known = {row["snapshot"] for row in self._database.query("SELECT snapshot FROM steps")}
        for record in self._snapshots.of_kinds(("step",)):
            if record.id not in known:
                self._snapshots.delete(record.id)
