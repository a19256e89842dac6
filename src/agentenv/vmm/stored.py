"""Files of layers: made whole or not at all, digested, and what it means when one cannot be used."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agentenv.errors import StoreCorrupt, StoreFault, StoreFull


def map_of(memory: Path) -> Path:
    """The file that says which pages a delta holds."""
    return memory.with_name(memory.name + ".map")


def digest_of(*files: Path) -> str:
    """`sha256:HEX` of the files' content, one after the other. A delta's is that of `memory`, then
    `memory.map`. Blocking: about a second per GiB, with the interpreter lock released.

    Raises:
        StoreCorrupt: a file is missing. StoreFault: it cannot be read.
    """
    content = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: content)
        except OSError as error:
            raise unreadable(path, error) from error
    return f"sha256:{content.hexdigest()}"


@contextmanager
def new_files() -> Iterator[Callable[[Path], int]]:
    """Gives a function that makes a file, mode 0600, and returns its descriptor, closed at the end of
    the block. When the block fails, none of the files is left, and the cause has a name.

    Raises:
        StoreFull: there is no space. StoreFault: they cannot be written, or were there before.
    """
    made: list[Path] = []
    with ExitStack() as stack:

        def make(path: Path) -> int:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise unwritable(path, error) from error
            made.append(path)
            stack.callback(os.close, descriptor)
            return descriptor

        try:
            yield make
        except BaseException as error:
            for path in made:
                path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise unwritable(made[-1], error) from error
            raise


def unwritable(path: Path, error: OSError) -> StoreFault:
    """The error for a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"no space for {path}", remedy="free space on its filesystem")
    return StoreFault(f"{path} cannot be written: {error.strerror}")


def unreadable(path: Path, error: OSError) -> StoreFault:
    """The error for a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return StoreCorrupt(f"{path} is missing")
    if error.errno == errno.EIO:
        return StoreCorrupt(f"{path} is damaged: {error.strerror}")
    return StoreFault(f"{path} cannot be read: {error.strerror}")
