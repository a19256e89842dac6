"""Which of the guest's files the records of a node refer to, so that they must stay."""

from __future__ import annotations

import sqlite3
from pathlib import Path

# Snapshots of memory are restored with the very files that their machine booted with; a sandbox that was
# booted will be paused into one.
_QUERY = """
SELECT DISTINCT value FROM {table}, json_each({table}.document, '$.fingerprint')
WHERE key IN ('kernel', 'initramfs', 'tools')
"""


def referred(database: Path) -> set[str] | None:
    """The SHA-256 of each such file, in hexadecimal; None where the records cannot be read."""
    if not database.exists():
        return set()
    try:
        connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10.0)
        try:
            found = [connection.execute(_QUERY.format(table=name)) for name in ("snapshots", "sandboxes")]
            return {str(digest) for rows in found for (digest,) in rows}
        finally:
            connection.close()
    except sqlite3.Error:  # better too many files than one too few
        return None
