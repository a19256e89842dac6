"""What a sandbox's log has: the events of its life, and what its guest wrote to the console.

All of it is in memory and bounded for each sandbox. A guest that floods its console loses lines.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentenv.building.logs import LEVELS
from agentenv.sandbox.observing import ENDINGS, Change, Happening, Observer

KEEP_BYTES = 256 * 1024
KEEP_ENDED = 64
LINE_MAX = 2000
# Lines of a console that are taken in one go, and per second.
BURST_LINES = 200
LINES_PER_S = 20.0
ENTRY_BYTES = 200  # of an entry besides its text

LIFE, CONSOLE = "sandbox", "console"
_LEVEL = {
    Change.UPDATED: "debug",
    Change.STALLED: "error",
    Change.PAUSE_FAILED: "error",
    Change.CHECKPOINT_FAILED: "error",
    Change.RESUME_FAILED: "error",
    Change.FAILED: "error",
}
# Terminal sequences (ECMA-48) and other control characters: a log's reader is to see the text.
_UNPRINTED = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\-_]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class Entry:
    """One line; `at` is seconds since the epoch, `logger` who says it."""

    at: float
    level: str
    logger: str
    message: str
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        fields = sum(len(name) + len(text) for name, text in self.fields.items())
        return ENTRY_BYTES + len(self.message) + fields

    @property
    def milliseconds(self) -> int:
        """When it was, in whole milliseconds since the epoch."""
        return round(self.at * 1e6) // 1000

    def line(self) -> str:
        """As one JSON object, the form that E2B's older call has lines in."""
        return json.dumps(
            {**self.fields, "level": self.level, "logger": self.logger, "message": self.message},
            ensure_ascii=False,
        )


@dataclass(frozen=True)
class Query:
    """Which entries are wanted: from a moment on (`forward`) or from it back, in milliseconds since the
    epoch, of at least a level, with a text in them."""

    cursor: int | None = None
    limit: int = 1000
    direction: Literal["forward", "backward"] = "forward"
    level: str = "debug"
    search: str = ""


def select(entries: Sequence[Entry], query: Query) -> list[Entry]:
    """The entries that a query wants, in its direction."""
    back = query.direction == "backward"
    least, text, cursor = LEVELS.index(query.level), query.search.lower(), query.cursor
    found: list[Entry] = []
    for entry in reversed(entries) if back else entries:
        if len(found) >= query.limit:
            break
        if cursor is not None and (entry.milliseconds > cursor if back else entry.milliseconds < cursor):
            continue
        if LEVELS.index(entry.level) >= least and text in entry.message.lower():
            found.append(entry)
    return found


class Book:
    """The log of one sandbox."""

    def __init__(self, keep_bytes: int = KEEP_BYTES, clock: Callable[[], float] = time.time) -> None:
        self._keep, self._clock = keep_bytes, clock
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._partial = b""
        self._allowed, self._allowed_at = float(BURST_LINES), clock()
        self._left_out = 0

    @property
    def entries(self) -> Sequence[Entry]:
        """All there are, oldest first. A line of the console is there when it is complete."""
        return self._entries

    def add(self, entry: Entry) -> None:
        """Add one; the oldest go where there is no room."""
        self._entries.append(entry)
        self._bytes += entry.size
        while self._bytes > self._keep and len(self._entries) > 1:
            self._bytes -= self._entries.popleft().size

    def console(self, data: bytes) -> None:
        """Take what a guest wrote. What there is no time for is counted, and one entry says so."""
        now = self._clock()
        passed = max(0.0, now - self._allowed_at)
        self._allowed, self._allowed_at = min(BURST_LINES, self._allowed + passed * LINES_PER_S), now
        if self._allowed < 1:
            self._left_out += len(data)
            self._partial = b""
            return
        if self._left_out:
            self.add(Entry(now, "warn", CONSOLE, f"[{self._left_out} bytes left out]"))
            self._left_out = 0
        for line in self._lines(data):
            self._allowed -= 1
            if text := self._printed(line):
                self.add(Entry(now, "info", CONSOLE, text))

    def _lines(self, data: bytes) -> Iterator[bytes]:
        *lines, rest = (self._partial + data).split(b"\n", max(1, int(self._allowed)))
        self._partial = b""
        if b"\n" in rest or len(rest) > LINE_MAX:
            self._left_out += max(0, len(rest) - LINE_MAX)
            lines.append(rest[:LINE_MAX].partition(b"\n")[0])
        else:
            self._partial = rest
        yield from lines

    @staticmethod
    def _printed(line: bytes) -> str:
        return _UNPRINTED.sub("", line[:LINE_MAX].decode(errors="replace")).rstrip()


class Logbook(Observer):
    """The logs of all sandboxes, the last ones of those that have ended too."""

    def __init__(self, ended: int = KEEP_ENDED) -> None:
        self._keep_ended = ended
        self._books: dict[str, Book] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, sandbox_id: str) -> bool:
        return sandbox_id in self._books

    def find(self, sandbox_id: str, query: Query) -> list[Entry]:
        """What a query wants of a sandbox's log; nothing where there is none."""
        book = self._books.get(sandbox_id)
        return [] if book is None else select(book.entries, query)

    def happened(self, happening: Happening) -> None:
        sandbox_id = happening.sandbox.id
        change, detail = happening.change, happening.detail
        reason = detail.get("reason")
        message = f"Sandbox {change.replace('_', ' ')}" + (f": {reason}" if reason else "")
        fields = {"event": str(change), **{name: text for name, text in detail.items() if name != "reason"}}
        entry = Entry(happening.at, _LEVEL.get(change, "info"), LIFE, message, fields)
        self._book(sandbox_id).add(entry)
        if change in ENDINGS:
            self._ended[sandbox_id] = None
            while len(self._ended) > self._keep_ended:
                self._books.pop(self._ended.popitem(last=False)[0], None)

    def wrote(self, sandbox_id: str, data: bytes) -> None:
        if sandbox_id not in self._ended:
            self._book(sandbox_id).console(data)

    def _book(self, sandbox_id: str) -> Book:
        return self._books.setdefault(sandbox_id, Book())
