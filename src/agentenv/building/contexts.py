"""The files that builds copy: uploaded by clients under the hash that these gave them, kept for a while.

An upload is a nameless file until it is whole, so nothing is left of one that breaks off.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentenv.config import Settings
from agentenv.errors import Forbidden, InvalidRequest, NotFound
from agentenv.vmm.stored import unwritable

LINK_LIFE_S = 3600 * 2
_HEX = frozenset("0123456789abcdef")


class Contexts:
    """The uploaded files of a node. Links to upload are good for this life of the node."""

    def __init__(self, settings: Settings) -> None:
        self._directory = settings.contexts_dir
        self._limit = settings.context_max_mib << 20
        self._keep_s = settings.context_keep_s
        self._secret = secrets.token_bytes(32)

    @property
    def directory(self) -> Path:
        """Where they are, made if it is missing."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._directory

    def find(self, digest: str) -> Path | None:
        """The files of that hash, which count as used now; None if they are not there."""
        path = self._path(digest)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def get(self, digest: str) -> Path:
        """The same, or raise NotFound."""
        found = self.find(digest)
        if found is None:
            raise NotFound(f"the files {digest[:12]} are not here", remedy="upload them again")
        return found

    def ticket(self, digest: str, now: float | None = None) -> str:
        """What lets one upload the files of a hash, for two hours."""
        until = int((time.time() if now is None else now) + LINK_LIFE_S)
        return f"{until}.{self._mark(self._path(digest).name, until)}"

    def check(self, digest: str, ticket: str, now: float | None = None) -> None:
        """Refuse an upload without its ticket.

        Raises:
            Forbidden: it is another's, or its time is over.
        """
        until, _, mark = ticket.partition(".")
        name = self._path(digest).name
        good = until.isdecimal() and hmac.compare_digest(mark.encode(), self._mark(name, int(until)).encode())
        if not good or int(until) < (time.time() if now is None else now):
            raise Forbidden("this link does not let you upload", remedy="ask for a new one")

    def _mark(self, name: str, until: int) -> str:
        return hmac.new(self._secret, f"{name} {until}".encode(), hashlib.sha256).hexdigest()

    async def receive(self, digest: str, body: AsyncIterator[bytes]) -> int:
        """Store what is uploaded, in the place of what was there; returns its length.

        Raises:
            InvalidRequest: it is larger than the node takes. StoreFull, StoreFault: it cannot be written.
        """
        path, size = self._path(digest), 0
        with _writing(path):
            descriptor = os.open(self.directory, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            async for data in body:
                size += len(data)
                if size > self._limit:
                    raise InvalidRequest(
                        f"the files are more than {self._limit >> 20} MiB",
                        remedy="leave some out (.dockerignore), or raise AENV_CONTEXT_MAX_MIB",
                    )
                with _writing(path):
                    await asyncio.to_thread(_write_all, descriptor, data)
            with _writing(path):
                path.unlink(missing_ok=True)
                os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
        finally:
            os.close(descriptor)
        return size

    def sweep(self, now: float) -> int:
        """Remove what was not used for long; returns how many."""
        if not self._directory.is_dir():
            return 0
        removed = 0
        for path in self._directory.iterdir():
            if path.stat().st_mtime < now - self._keep_s:
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def _path(self, digest: str) -> Path:
        if len(digest) != 64 or not _HEX.issuperset(digest):
            raise InvalidRequest(f"{digest[:80]!r} is no hash of files", remedy="64 hexadecimal digits")
        return self._directory / digest


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
