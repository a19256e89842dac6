"""Content by digest on this host: what came from registries, each once, whichever images it is part of.

`sha256/HEX` is whole; `partial/HEX` is being fetched, or was when the connection or the process ended, and is
gone on with. Processes share a store: whoever fetches a blob has a lock on its partial file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from agentenv.errors import StoreCorrupt
from agentenv.image.locking import locked
from agentenv.image.streams import CHUNK
from agentenv.image.tree import host_faults

_REMEDY = "the registry or a proxy before it serves other content than it names; try another mirror"


def digest_of(data: bytes) -> str:
    """The digest of some bytes, as `sha256:HEX`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class BlobStore:
    """The blobs in a directory, which is made when the first one comes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._whole = directory / "sha256"
        self._partial = directory / "partial"

    def path(self, digest: str) -> Path:
        """Where the blob is, or will be."""
        return self._whole / digest.removeprefix("sha256:")

    def has(self, digest: str) -> bool:
        """Whether it is here, whole."""
        return self.path(digest).is_file()

    def open(self, digest: str) -> IO[bytes]:
        """The bytes of a blob, which counts as used now."""
        try:
            file = self.path(digest).open("rb")
        except FileNotFoundError:
            raise StoreCorrupt(f"the blob {digest} is not there any more", remedy="try again") from None
        os.utime(file.fileno())
        return file

    def put(self, data: bytes) -> str:
        """Store a small document; returns its digest.

        Raises:
            StoreFull, HostFault: it cannot be written.
        """
        digest = digest_of(data)
        if not self.has(digest):
            with self.fetching(digest, len(data)) as partial:
                if partial is not None:
                    partial.restart()
                    partial.write(data)
                    partial.finish()
        return digest

    def drop_if_damaged(self, digest: str) -> bool:
        """Remove a blob that is not what its name says, as after a crash of the host. Blocking."""
        with self.open(digest) as file:
            found = hashlib.sha256()
            while data := file.read(CHUNK):
                found.update(data)
        if f"sha256:{found.hexdigest()}" == digest:
            return False
        self.path(digest).unlink(missing_ok=True)
        return True

    @contextmanager
    def fetching(self, digest: str, size: int) -> Iterator[Partial | None]:
        """The blob's file, to be filled up and finished; None when somebody else has finished it while this
        waited for the lock (blocking). What is not finished stays, to be gone on with, unless the disk is
        full or the content wrong.

        Raises:
            StoreFull, HostFault: it cannot be written.
        """
        with host_faults(f"the blob {digest}"):
            for directory in (self._whole, self._partial):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._partial / digest.removeprefix("sha256:")
            with locked(path) as file:
                if self.has(digest):
                    path.unlink(missing_ok=True)
                    yield None
                    return
                try:
                    yield Partial(file, path, self.path(digest), digest, size)
                except (OSError, StoreCorrupt):
                    path.unlink(missing_ok=True)
                    raise


class Partial:
    """A blob being fetched: bytes are appended in order, hashed as they come."""

    def __init__(self, file: IO[bytes], path: Path, whole: Path, digest: str, size: int) -> None:
        self._file, self._path, self._whole = file, path, whole
        self._digest, self._size = digest, size
        self._hash = hashlib.sha256()
        self.offset = 0
        file.seek(0)
        while data := file.read(CHUNK):  # what an earlier attempt left
            self._hash.update(data)
            self.offset += len(data)
        if self.offset > size:
            self.restart()

    def restart(self) -> None:
        """Forget what is there."""
        os.ftruncate(self._file.fileno(), 0)
        self._hash = hashlib.sha256()
        self.offset = 0

    def write(self, data: bytes) -> None:
        """Append.

        Raises:
            StoreCorrupt: it becomes longer than it should be.
        """
        if self.offset + len(data) > self._size:
            self._refuse(f"is longer than {self._size} bytes")
        view = memoryview(data)
        while view:
            view = view[os.write(self._file.fileno(), view) :]
        self._hash.update(data)
        self.offset += len(data)

    def finish(self) -> None:
        """Give it its name.

        Raises:
            StoreCorrupt: the content is not what the digest says; nothing of it stays.
        """
        found = f"sha256:{self._hash.hexdigest()}"
        if self.offset != self._size:
            self._refuse(f"has {self.offset} bytes instead of {self._size}")
        if found != self._digest:
            self._refuse(f"came with the content of {found}")
        self._path.chmod(0o400)
        self._path.rename(self._whole)

    def _refuse(self, why: str) -> None:
        self.restart()
        raise StoreCorrupt(f"the blob {self._digest} {why}", remedy=_REMEDY)
