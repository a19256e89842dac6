"""From an uploaded tar archive to the stream that is placed in a guest. All functions block.

Which of the archive's members are meant, and under which names they arrive, is decided here; where they go
is the guest's matter (`programs/place.py`). The stream is a line with the name of the one thing that is
copied (empty for a directory's content), then for each member a line of kind, mode, modification time, owner,
group, and the lengths of name, link and content, followed by these three; at the end a line with a dot.
Kinds are `D` directory, `F` file, `L` symbolic link, `H` hard link.
"""

from __future__ import annotations

import gzip
import posixpath
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from agentenv.errors import InvalidRequest
from agentenv.vmm.stored import unreadable, unwritable

CHUNK_BYTES = 256 * 1024
NAME_LIMIT_BYTES = 4096

_MAGIC = frozenset("*?[{\\")
_DAMAGED = (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile)


def static_part(source: str) -> str:
    """The part of a COPY's source before anything that is a pattern, normalized; empty for all of it. The
    client resolved the pattern already: what the archive has below that part is what it matched."""
    kept = []
    for part in source.split("/"):
        if _MAGIC & set(part):
            break
        kept.append(part)
    return _normal("/".join(kept))


def _normal(name: str) -> str:
    """A member's name relative to the archive's root; the root itself is empty.

    Raises:
        InvalidRequest: it leads outside.
    """
    path = posixpath.normpath(name.lstrip("/") or ".")
    if path == ".." or path.startswith("../"):
        raise InvalidRequest(f"{name!r} leads out of the files to copy")
    return "" if path == "." else path


def relative(name: str, base: str) -> str | None:
    """A member's name below `base`, empty for that itself; None when it lies elsewhere."""
    if not base:
        return name
    if name == base:
        return ""
    return name[len(base) + 1 :] if name.startswith(f"{base}/") else None


def pack(archive: Path, source: str, out: BinaryIO, *, limit_bytes: int) -> int:
    """Write the stream of what `source` means in an archive; returns its length.

    Raises:
        InvalidRequest: there is no such file in it, it is no archive, or more than `limit_bytes` are to be
            written. StoreFull, StoreFault: it cannot be written.
    """
    base = static_part(source)
    try:
        with tarfile.open(archive, "r|*") as tar:
            begun = False
            for member in tar:
                name = relative(_normal(member.name), base)
                if name is None:
                    continue
                if not begun:
                    _begin(out, posixpath.basename(base) if name == "" and not member.isdir() else "")
                    begun = True
                if name or not member.isdir():
                    _member(tar, member, name, base, out)
                if out.tell() > limit_bytes:
                    raise InvalidRequest(
                        f"the files to copy are more than {limit_bytes >> 20} MiB", remedy="copy less"
                    )
    except _DAMAGED as error:
        raise InvalidRequest(f"the uploaded files are no whole tar archive: {error}") from None
    except OSError as error:
        raise unreadable(archive, error) from error
    if not begun:
        raise InvalidRequest(f"source path does not exist: {source}")
    _write(out, b".\n")
    return out.tell()


def _begin(out: BinaryIO, single: str) -> None:
    _write(out, _encoded(single).replace(b"\n", b"\1") + b"\n")


def _member(tar: tarfile.TarFile, member: tarfile.TarInfo, name: str, base: str, out: BinaryIO) -> None:
    if member.isdir():
        _head(out, b"D", member, name, "", 0)
    elif member.isreg():
        _head(out, b"F", member, name, "", member.size)
        for data in _content(tar, member):
            _write(out, data)
    elif member.issym():
        _head(out, b"L", member, name, member.linkname, 0)
    elif member.islnk():
        first = relative(_normal(member.linkname), base)
        if first is None:
            raise InvalidRequest(f"{member.name} is a link to {member.linkname}, which is not copied")
        _head(out, b"H", member, name, first, 0)
    else:
        raise InvalidRequest(f"{member.name} is neither a file nor a directory nor a link")


def _head(out: BinaryIO, kind: bytes, member: tarfile.TarInfo, name: str, link: str, size: int) -> None:
    encoded, target = _encoded(name), _encoded(link)
    if len(encoded) > NAME_LIMIT_BYTES or len(target) > NAME_LIMIT_BYTES:
        raise InvalidRequest(f"{name[:80]}… has a name that is too long")
    facts = (member.mode & 0o7777, max(0, int(member.mtime)), member.uid, member.gid)
    numbers = (*facts, len(encoded), len(target), size)
    _write(out, kind + b" " + " ".join(map(str, numbers)).encode() + b"\n" + encoded + target)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    file = tar.extractfile(member)
    assert file is not None
    left = member.size
    while left:
        data = file.read(min(CHUNK_BYTES, left))
        if not data:
            raise InvalidRequest("the uploaded files are cut off")
        left -= len(data)
        yield data


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _write(out: BinaryIO, data: bytes) -> None:
    try:
        out.write(data)
    except OSError as error:
        raise unwritable(Path("a build's scratch file"), error) from error
