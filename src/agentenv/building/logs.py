"""What a build tells: entries with a level and a step, numbered from 0 without gaps."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentenv.records.database import Database

LEVELS = ("debug", "info", "warn", "error")
PAGE_MAX = 100
LINE_MAX = 4000
ENTRIES_MAX = 20_000


@dataclass(frozen=True)
class Entry:
    """One thing told; `at` is seconds since the epoch."""

    at: float
    level: str
    message: str
    step: str | None = None


class Logs:
    """The table of what builds told."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, build_id: str, entries: Sequence[Entry]) -> None:
        """Add entries at the end; above a limit one says so, and the rest is dropped."""
        with self._database.transaction() as cursor:
            count = cursor.execute(
                "SELECT coalesce(max(number) + 1, 0) FROM build_logs WHERE build = ?", (build_id,)
            ).fetchone()[0]
            for number, entry in enumerate(fitting(entries, count), count):
                cursor.execute(
                    "INSERT INTO build_logs SELECT ?1, ?2, ?3, ?4, ?5, ?6"
                    " WHERE EXISTS (SELECT 1 FROM builds WHERE id = ?1)",
                    (build_id, number, entry.at, entry.level, entry.step, entry.message),
                )

    def page(self, build_id: str, offset: int, limit: int = PAGE_MAX, level: str = "debug") -> list[Entry]:
        """Entries from number `offset` on, of at least a level."""
        wanted = LEVELS[LEVELS.index(level) :]
        marks = ", ".join("?" * len(wanted))
        rows = self._database.query(
            f"SELECT * FROM build_logs WHERE build = ? AND level IN ({marks})"
            " ORDER BY number LIMIT ? OFFSET ?",
            (build_id, *wanted, min(limit, PAGE_MAX), offset),
        )
        return [Entry(row["at"], row["level"], row["message"], row["step"]) for row in rows]


def fitting(entries: Sequence[Entry], count: int) -> list[Entry]:
    """The entries of which there is room beside `count` others; the last place says that there is no more."""
    room = ENTRIES_MAX - count
    if len(entries) < room:
        return list(entries)
    kept = list(entries[: max(0, room - 1)])
    if room > 0:
        kept.append(Entry(entries[room - 1].at, "warn", "the log is full: what follows is not kept"))
    return kept


class Feed:
    """What one making of a template tells, to all builds that share it; who comes later hears it all."""

    def __init__(self) -> None:
        self._told: list[Entry] = []
        self._listeners: list[Callable[[Sequence[Entry]], None]] = []

    def tell(self, level: str, message: str, step: str | None = None) -> None:
        """Tell one thing."""
        self.pass_on([Entry(time.time(), level, message[:LINE_MAX], step)])

    def pass_on(self, entries: Sequence[Entry]) -> None:
        """Tell entries."""
        if len(self._told) < ENTRIES_MAX:
            self._told.extend(entries)
        for listener in self._listeners:
            listener(entries)

    def listen(self, listener: Callable[[Sequence[Entry]], None]) -> None:
        """Have `listener` told everything, from the beginning."""
        if self._told:
            listener(self._told)
        self._listeners.append(listener)

    def ignore(self, listener: Callable[[Sequence[Entry]], None]) -> None:
        """Tell it nothing more."""
        if listener in self._listeners:
            self._listeners.remove(listener)


class Lines:
    """Makes lines out of a command's streams."""

    def __init__(self, line: Callable[[str, str], None]) -> None:
        self._line = line
        self._decoders = {
            name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")
        }
        self._open = {"stdout": "", "stderr": ""}

    def feed(self, stream: str, data: bytes) -> None:
        """Take what came on a stream."""
        *whole, rest = (self._open[stream] + self._decoders[stream].decode(data)).split("\n")
        for each in whole:
            self._give(stream, each)
        while len(rest) > LINE_MAX:
            self._give(stream, rest[:LINE_MAX])
            rest = rest[LINE_MAX:]
        self._open[stream] = rest

    def end(self) -> None:
        """Give what has no end of line."""
        for stream, rest in self._open.items():
            self._give(stream, rest)
            self._open[stream] = ""

    def _give(self, stream: str, line: str) -> None:
        # A progress bar goes back over its line: what it came to is what counts.
        shown = line.rstrip("\r").rpartition("\r")[2].rstrip()
        if shown:
            self._line(stream, shown)
