"""The ledger of host resources: written before a resource is made, struck after it is gone.

After a crash the ledger tells what may exist. Each kind has an owner module that knows how to look
and release; the ledger itself only remembers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.records.database import Database


@dataclass(frozen=True)
class Entry:
    """One host resource that exists, or may."""

    id: int
    owner: str
    kind: str
    name: str
    detail: dict[str, Any]
    boot_id: str


def host_boot_id() -> str:
    """The kernel's id of the present boot: another one means processes and namespaces are gone."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Ledger:
    """Entries by owner and kind, in the node's database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.boot_id = host_boot_id()

    def record(self, owner: str, kind: str, name: str, **detail: Any) -> Entry:
        """Note that `name` is about to be made for `owner`. A (kind, name) is recorded once."""
        with self._database.transaction() as cursor:
            cursor.execute(
                "INSERT INTO resources (owner, kind, name, detail, boot_id) VALUES (?, ?, ?, ?, ?)",
                (owner, kind, name, json.dumps(detail), self.boot_id),
            )
            assert cursor.lastrowid is not None
            return Entry(cursor.lastrowid, owner, kind, name, detail, self.boot_id)

    def amend(self, entry: Entry, **detail: Any) -> Entry:
        """Add what became known when the resource was made, such as a process id."""
        merged = {**entry.detail, **detail}
        with self._database.transaction() as cursor:
            cursor.execute("UPDATE resources SET detail = ? WHERE id = ?", (json.dumps(merged), entry.id))
        return Entry(entry.id, entry.owner, entry.kind, entry.name, merged, entry.boot_id)

    def strike(self, entry: Entry) -> None:
        """Note that the resource is gone."""
        with self._database.transaction() as cursor:
            cursor.execute("DELETE FROM resources WHERE id = ?", (entry.id,))

    def hand_over(self, entry: Entry, owner: str) -> Entry:
        """Change the owner, as when a pooled slot goes to a sandbox."""
        with self._database.transaction() as cursor:
            cursor.execute("UPDATE resources SET owner = ? WHERE id = ?", (owner, entry.id))
        return Entry(entry.id, owner, entry.kind, entry.name, entry.detail, entry.boot_id)

    def entries(self, *, owner: str | None = None, kind: str | None = None) -> list[Entry]:
        """Entries in the order they were recorded, of one owner or kind if given."""
        rows = self._database.query(
            "SELECT * FROM resources"
            " WHERE (?1 IS NULL OR owner = ?1) AND (?2 IS NULL OR kind = ?2) ORDER BY id",
            (owner, kind),
        )
        return [
            Entry(
                row["id"], row["owner"], row["kind"], row["name"], json.loads(row["detail"]), row["boot_id"]
            )
            for row in rows
        ]
