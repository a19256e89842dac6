"""Shells that were left and can be gone back to, as remembered on this machine for this user.

Each is an empty file, `SANDBOX.TAG`, which is locked while somebody is attached: a terminal that is closed
leaves a shell that can be gone back to as well.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

FORGOTTEN_S = 30 * 86400.0


class Held:
    """One shell, attached to here."""

    def __init__(self, tag: str, file: int | None, path: Path | None) -> None:
        self.tag = tag
        self._file = file
        self._path = path

    def let_go(self, *, forget: bool) -> None:
        """It is left, or has ended and is forgotten."""
        if self._file is None:
            return
        if forget and self._path is not None:
            self._path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = None


class Shells:
    """Those in one directory; where that cannot be written nothing is remembered."""

    def __init__(self, directory: Path | None = None) -> None:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
        self._directory = directory or state / "aenv/shells"

    def left(self, sandbox_id: str) -> list[str]:
        """Tags of the shells of a sandbox that are remembered, the one left last first."""
        try:
            found = [(path.stat().st_mtime, path) for path in self._directory.iterdir()]
        except OSError:
            return []
        prefix = f"{sandbox_id}."
        tags = []
        for changed, path in sorted(found, reverse=True):
            if changed < time.time() - FORGOTTEN_S:
                path.unlink(missing_ok=True)
            elif path.name.startswith(prefix):
                tags.append(path.name.removeprefix(prefix))
        return tags

    def hold(self, sandbox_id: str, tag: str) -> Held | None:
        """Be the one that is attached to a shell; None if another is."""
        path = self._directory / f"{sandbox_id}.{tag}"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return Held(tag, None, path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        os.utime(path)
        return Held(tag, file, path)

    def forget(self, sandbox_id: str, tag: str) -> None:
        """It is not there any more."""
        if (held := self.hold(sandbox_id, tag)) is not None:
            held.let_go(forget=True)
