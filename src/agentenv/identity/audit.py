"""The audit log: who changed what, when, and what came of it, as lines of JSON in the data directory.

Neither bodies nor secrets are written. Lines are written by a thread of their own, so that no request
waits for the disk; a stop writes what is left. The file is turned over at a size, and so many are kept.
"""

from __future__ import annotations

import json
import logging
import queue
from datetime import UTC, datetime
from logging.handlers import QueueListener, RotatingFileHandler
from pathlib import Path
from typing import Any

from agentenv.errors import HostFault

log = logging.getLogger(__name__)

# Entries that wait for the disk; a disk that takes longer loses some, and the next line says how many.
WAITING_MOST = 10_000


class Audit:
    """One file and those before it.

    Args:
        path: of the newest file; those before have `.1` and so on behind it.
        file_bytes: when a new file is begun.
        files: how many are kept besides.

    Raises:
        HostFault: the file cannot be opened.
    """

    def __init__(self, path: Path, *, file_bytes: int, files: int) -> None:
        try:
            self._handler = RotatingFileHandler(
                path, maxBytes=file_bytes, backupCount=files, encoding="utf-8", errors="backslashreplace"
            )
            path.chmod(0o600)
        except OSError as error:
            raise HostFault(f"the audit log {path}: {error.strerror}") from error
        self._handler.setFormatter(logging.Formatter("%(message)s"))
        self._queue: queue.Queue[Any] = queue.Queue(WAITING_MOST)
        self._listener = QueueListener(self._queue, self._handler)
        self._lost = 0
        self._closed = False
        self._listener.start()

    def note(self, **entry: object) -> None:
        """Write a line with the time and these fields, by and by."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        document = {"time": at, **{name: value for name, value in entry.items() if value is not None}}
        if self._lost:
            document["lost_before"] = self._lost
        record = logging.makeLogRecord({"msg": json.dumps(document)})
        try:
            self._queue.put_nowait(record)
            self._lost = 0
        except queue.Full:
            if not self._lost:
                log.error("the audit log cannot be written as fast as it comes; entries are lost")
            self._lost += 1

    def close(self) -> None:
        """Write what is left and close the file. Repeatable."""
        if self._closed:
            return
        self._closed = True
        self._listener.stop()
        self._handler.close()
