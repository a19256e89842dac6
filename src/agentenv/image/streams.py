"""Byte streams of images: slices of files, digests on the way, decompression, tar members."""

from __future__ import annotations

import bz2
import hashlib
import io
import lzma
import queue
import subprocess
import tarfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Protocol, Self, cast

from agentenv.errors import HostIncapable, InvalidRequest, StoreCorrupt
from agentenv.image.source import compression_of

CHUNK = 1 << 18
_FAULTS = (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, ValueError, OSError)
HEADER_LIMIT = 1 << 20  # bytes of one extended header (names, xattrs); a kernel xattr is at most 64 KiB


class Readable(Protocol):
    """What is read from here: `read(n)` returns at most n bytes, and none at the end."""

    def read(self, size: int = ..., /) -> bytes: ...


class Slice(io.RawIOBase):
    """A part of a seekable file, read from its beginning; closes the file when closed."""

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        self._file, self._at, self._end = file, offset, offset + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        self._file.seek(self._at)
        data = self._file.read(min(len(buffer), self._end - self._at))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class Hashing:
    """Passes bytes on and keeps the SHA-256 of what has passed."""

    def __init__(self, source: Readable) -> None:
        self._source = source
        self._hash = hashlib.sha256()
        self.count = 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(size)
        self._hash.update(data)
        self.count += len(data)
        return data

    @property
    def digest(self) -> str:
        """The digest so far, as `sha256:HEX`."""
        return f"sha256:{self._hash.hexdigest()}"

    def drain(self) -> None:
        """Read to the end."""
        while self.read(CHUNK):
            pass


class ZstdReader:
    """Decompresses through the `zstd` program, which every supported distribution has.

    A thread feeds it, so that the source can be any reader.
    """

    def __init__(self, source: Readable) -> None:
        try:
            self._process = subprocess.Popen(
                ["zstd", "-dcq"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except FileNotFoundError:
            raise HostIncapable(
                "the image is compressed with zstd, and there is no zstd program",
                remedy="apt-get install zstd",
            ) from None
        self._fault: BaseException | None = None
        self._feeder = threading.Thread(target=self._feed, args=(source,), daemon=True)
        self._feeder.start()

    def _feed(self, source: Readable) -> None:
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                while data := source.read(CHUNK):
                    pipe.write(data)
        except BrokenPipeError:
            pass  # zstd gave up, and its exit status says so, or the reader closed
        except BaseException as error:  # handed to the reading thread, which raises it
            self._fault = error
            self._process.kill()

    def read(self, size: int = -1, /) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if not data and size != 0:
            self._finish()
        return data

    def _finish(self) -> None:
        self._feeder.join()
        if self._fault is not None:
            raise self._fault
        if self._process.wait() != 0:
            assert self._process.stderr is not None
            raise zlib.error(self._process.stderr.read(500).decode(errors="replace").strip() or "zstd failed")

    def close(self) -> None:
        """End the program, whatever is left to read."""
        self._process.kill()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        self._process.wait()
        self._feeder.join()


class GzipReader:
    """Decompresses in a thread of its own, a few chunks ahead of whoever reads."""

    _AHEAD = 8  # chunks

    def __init__(self, source: Readable) -> None:
        self._chunks: queue.Queue[bytes | BaseException] = queue.Queue(self._AHEAD)
        self._closed = threading.Event()
        self._rest = memoryview(b"")
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(source,), daemon=True)
        self._thread.start()

    def _run(self, source: Readable) -> None:
        last: bytes | BaseException = b""
        try:
            for data in _gunzipped(source):
                if not self._hand(data):
                    return
        except BaseException as error:  # handed to the reading thread, which raises it
            last = error
        self._hand(last)

    def _hand(self, data: bytes | BaseException) -> bool:
        self._chunks.put(data)
        return not self._closed.is_set()

    def read(self, size: int = -1, /) -> bytes:
        if not self._rest and not self._ended:
            data = self._chunks.get()
            if isinstance(data, BaseException):
                self._ended = True
                raise data
            self._ended = not data
            self._rest = memoryview(data)
        taken = self._rest if size < 0 else self._rest[:size]
        self._rest = self._rest[len(taken) :]
        return bytes(taken)

    def close(self) -> None:
        """End the thread, whatever is left to read."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._chunks.get(timeout=0.05)
            except queue.Empty:
                pass


def _gunzipped(source: Readable) -> Iterator[bytes]:
    """The plain bytes of a gzip file of any number of members; zeros may follow the last one."""
    data = source.read(CHUNK)
    while data:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            if plain := member.decompress(data, CHUNK):
                yield plain
            data = member.unconsumed_tail
            if not member.eof and not data and not (data := source.read(CHUNK)):
                if plain := member.flush():
                    yield plain
                if not member.eof:
                    raise EOFError("it ends too early")
        data = member.unused_data
        while not data.strip(b"\0") and (data := source.read(CHUNK)):
            pass
        data = data.lstrip(b"\0")


class Prefixed(io.RawIOBase):
    """A reader to which some first bytes are given back."""

    def __init__(self, head: bytes, rest: Readable) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        data = self._head[: len(buffer)]
        if data:
            self._head = self._head[len(data) :]
        else:
            data = self._rest.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def decompressed(source: Readable) -> Iterator[Readable]:
    """The plain bytes of a source that may be compressed; its first bytes tell how."""
    head = source.read(8)
    stream = io.BufferedReader(Prefixed(head, source), CHUNK)
    with ExitStack() as stack:
        match compression_of(head):
            case "gzip":
                unpacking = GzipReader(stream)
                stack.callback(unpacking.close)
                yield unpacking
            case "xz":
                yield stack.enter_context(lzma.LZMAFile(stream))
            case "bzip2":
                yield stack.enter_context(bz2.BZ2File(stream))
            case "zstd":
                reader = ZstdReader(stream)
                stack.callback(reader.close)
                yield reader
            case "plain":
                yield stream


class _Member(tarfile.TarInfo):
    """A tar member whose extended headers are bounded: tarfile reads them whole into memory."""

    _EXTENDED = (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str | None, errors: str) -> Self:
        # tarfile takes a damaged header after the first one for the end of the archive.
        try:
            return super().frombuf(buf, encoding, errors)  # type: ignore[arg-type]
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(str(error)) from None

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo | None:
        if self.size < 0 or (self.type in self._EXTENDED and self.size > HEADER_LIMIT):
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        member: tarfile.TarInfo | None = super()._proc_member(archive)  # type: ignore[misc]
        return member


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members one by one, none kept in memory."""
    while (member := tar.next()) is not None:
        yield member
        tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep every one, a kilobyte each


def content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Readable:
    """The bytes of the file that `members` has just given: what a stream gives next. (A reader that tarfile
    makes for each file costs a tenth of the time of unpacking small ones.)"""
    if member.sparse is None:
        return cast(Readable, tar.fileobj)
    made = tar.extractfile(member)
    assert made is not None
    return made


@contextmanager
def tar_stream(source: Readable) -> Iterator[tarfile.TarFile]:
    """A tarball read forwards only.

    Raises:
        InvalidRequest: it is no tarball from its first block on.
    """
    try:
        tar = tarfile.open(  # noqa: SIM115 - closed below; entering it would hide the error below
            fileobj=cast(IO[bytes], source),
            mode="r|",
            bufsize=CHUNK,
            tarinfo=_Member,
            encoding="utf-8",
            errors="surrogateescape",
        )
    except tarfile.ReadError as error:
        raise InvalidRequest(
            f"not a tarball, nor a compressed one: {error}",
            remedy="give a tar file, plain or compressed with gzip, zstd, xz or bzip2",
        ) from error
    with tar:
        yield tar


@contextmanager
def read_faults(what: str) -> Iterator[None]:
    """Turn the many errors of damaged archives into one.

    Raises:
        StoreCorrupt: reading inside the block failed because the data are damaged.
    """
    try:
        yield
    except _FAULTS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the host's trouble; bz2 and gzip raise theirs without a number
        raise StoreCorrupt(
            f"{what} is damaged: {error or type(error).__name__}", remedy="make or fetch the image again"
        ) from error


@contextmanager
def tar_index(file: IO[bytes]) -> Iterator[tarfile.TarFile]:
    """A plain tarball of which only the headers are read, content being skipped by seeking."""
    try:
        tar = tarfile.open(  # noqa: SIM115
            fileobj=file, mode="r:", tarinfo=_Member, encoding="utf-8", errors="surrogateescape"
        )
    except tarfile.TarError as error:
        raise InvalidRequest(f"not a tarball: {error}", remedy="give what `docker save` wrote") from error
    with tar:
        yield tar
