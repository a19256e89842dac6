"""What a COPY takes from the context, packed so that the bytes depend on the content alone."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from agentenv.errors import Conflict, StoreFault

# One time for all files, 2001-09-09, so that it does not count; late enough for ZIP, which begins with 1980.
MTIME = 1_000_000_000
LEVEL = 1  # of gzip: what is packed goes over a short way and is unpacked at once
CHUNK = 1 << 20

Kind = Literal["file", "directory", "link"]


@dataclass(frozen=True)
class Entry:
    """A file, directory or symbolic link; `mode` are its permission bits.

    A file's bytes are those of `source`, or `content` where they are no file of the context. `size` is in
    bytes.
    """

    name: str
    kind: Kind
    mode: int
    source: Path | None = None
    content: bytes = b""
    size: int = 0
    target: str = ""


@dataclass(frozen=True)
class Archive:
    """A tar archive (plain, gzip, bzip2 or xz) whose members go under the directory `into`."""

    path: Path
    into: str


@dataclass(frozen=True)
class Bundle:
    """The entries and archives of one COPY, in the order in which they are laid over each other."""

    parts: tuple[Entry | Archive, ...]

    def digest(self) -> str:
        """The SHA-256 of what it packs to, before compression, as 64 hexadecimal digits.

        Raises:
            StoreFault: a file cannot be read. Conflict: it changed while it was read.
        """
        sink = _Hashing(None)
        self._write(sink)
        return sink.hexdigest

    def pack(self, out: IO[bytes], digest: str) -> None:
        """Write it as tar.gz.

        Raises:
            Conflict: it is no longer what `digest` was taken of. StoreFault: a file cannot be read.
        """
        with gzip.GzipFile(filename="", mode="wb", compresslevel=LEVEL, fileobj=out, mtime=0) as packed:
            sink = _Hashing(packed)
            self._write(sink)
        if sink.hexdigest != digest:
            raise Conflict("the build context changed while it was read", remedy="build again")

    @property
    def size(self) -> int:
        """Bytes of its files, as far as they are known without unpacking."""
        return sum(part.size if isinstance(part, Entry) else part.path.stat().st_size for part in self.parts)

    def _write(self, sink: _Hashing) -> None:
        # Streamed: never more than a chunk of a file is in memory.
        with tarfile.open(mode="w|", fileobj=sink, format=tarfile.PAX_FORMAT, bufsize=CHUNK) as tar:
            for part in self.parts:
                if isinstance(part, Archive):
                    _add_archive(tar, part)
                else:
                    _add_entry(tar, part)


class _Hashing(io.RawIOBase):
    """Hashes what is written, and passes it on."""

    def __init__(self, out: IO[bytes] | gzip.GzipFile | None) -> None:
        self._out = out
        self._hash = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        self._hash.update(data)
        if self._out is not None:
            self._out.write(data)
        return len(data)

    @property
    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _add_entry(tar: tarfile.TarFile, entry: Entry) -> None:
    member = _member(entry.name, entry.mode)
    if entry.kind == "directory":
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
    elif entry.kind == "link":
        member.type, member.linkname = tarfile.SYMTYPE, entry.target
        tar.addfile(member)
    elif entry.source is None:
        member.size = len(entry.content)
        tar.addfile(member, io.BytesIO(entry.content))
    else:
        _add_file(tar, member, entry.source)


def _add_file(tar: tarfile.TarFile, member: tarfile.TarInfo, source: Path) -> None:
    try:
        with source.open("rb") as file:
            member.size = os.fstat(file.fileno()).st_size
            tar.addfile(member, file)
    except OSError as error:
        if error.errno is None:  # tarfile's own: the file ended before its size
            raise Conflict(f"{source} changed while it was read", remedy="build again") from None
        raise StoreFault(f"{source} cannot be packed: {error.strerror}") from error


def _add_archive(tar: tarfile.TarFile, archive: Archive) -> None:
    with opened(archive.path) as members:
        for member in members:
            name = inside(archive.into, member.name)
            if name == archive.into:
                continue
            data = members.extractfile(member) if member.isreg() else None
            if member.islnk():
                member.linkname = inside(archive.into, member.linkname)
            member.name, member.uname, member.gname, member.pax_headers = name, "", "", {}
            if member.issparse():  # its holes are written out
                member.type, member.sparse = tarfile.REGTYPE, None
            tar.addfile(member, data)


@contextmanager
def opened(path: Path) -> Iterator[tarfile.TarFile]:
    """The tar archive at `path`, read from its beginning to its end.

    Raises:
        StoreFault: it cannot be read, or is damaged.
    """
    try:
        with tarfile.open(path, "r:*") as archive:
            yield archive
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise StoreFault(f"{path} is a damaged archive: {error}") from None
    except OSError as error:
        raise StoreFault(f"{path} cannot be read: {error.strerror or error}") from error


def inside(directory: str, name: str) -> str:
    """Where a member goes under `directory`: what would climb out of it stays in, as if it were the root."""
    path = posixpath.normpath(f"/{name}").lstrip("/")
    return f"{directory}/{path}" if path else directory


def _member(name: str, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = stat.S_IMODE(mode), MTIME
    return member
