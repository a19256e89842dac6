"""Who keeps a content in the cache: entries of the ledger, which every process on the directory sees."""

from __future__ import annotations

import os
import uuid

from agentenv.proc import start_time
from agentenv.records.ledger import Entry, Ledger

KIND = "image-hold"


class Hold:
    """Keeps what the cache has of an image, until released or until this process is gone."""

    def __init__(self, ledger: Ledger, entry: Entry) -> None:
        self._ledger = ledger
        self._entry: Entry | None = entry

    def release(self) -> None:
        """End it; repeatable."""
        if self._entry is not None:
            self._ledger.strike(self._entry)
            self._entry = None

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *fault: object) -> None:
        self.release()


class Holds:
    """The holds of all processes."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def take(self, digest: str) -> Hold:
        """A new hold of a content."""
        entry = self._ledger.record(
            digest, KIND, str(uuid.uuid4()), pid=os.getpid(), started=start_time(os.getpid())
        )
        return Hold(self._ledger, entry)

    def digests(self) -> frozenset[str]:
        """The contents held by processes that live; holds of others are struck."""
        held = set()
        for entry in self._ledger.entries(kind=KIND):
            if is_alive(self._ledger, entry):
                held.add(entry.owner)
            else:
                self._ledger.strike(entry)
        return frozenset(held)


def is_alive(ledger: Ledger, entry: Entry) -> bool:
    """Whether a process that an entry names, as `pid` and `started` or as `worker`, still runs."""
    if entry.boot_id != ledger.boot_id:
        return False
    detail = entry.detail
    processes = [(detail["pid"], detail["started"]), (detail.get("worker"), detail.get("worker_started"))]
    return any(pid is not None and began is not None and start_time(pid) == began for pid, began in processes)
