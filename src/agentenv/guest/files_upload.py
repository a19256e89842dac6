"""`POST /files`: files come in, as form parts or as the bare body, and go straight to their places.

An existing file keeps its inode: it is handed to the user, emptied and written. A watch sees a new
file as created, changed in mode (the new owner) and written, one event each when it has at most
`_GATHER` bytes, which is what E2B's clients count on.
"""

from __future__ import annotations

import errno
import os
import stat

from agentenv.guest import files_metadata
from agentenv.guest.files import refuse
from agentenv.guest.files_multipart import MultipartError, MultipartParser, Part, parameters
from agentenv.guest.http import HttpError, json_response
from agentenv.guest.loop import checkpoint
from agentenv.guest.paths import PathError, base_name, expand, make_directories, parent, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from agentenv.guest.http import Request, Response
    from agentenv.guest.users import User

_GATHER = 256 * 1024
_FILE_MODE = 0o644

# How much of a refused body is still read, so that its client comes to read the answer.
_DRAIN = 16 * 1024 * 1024


async def upload(request: Request, user: User, workdir: str | None) -> Response:
    """Store the request's files; the answer lists them in order.

    Raises:
        HttpError: 400 a bad path, header or form; 403 not writable; 507 no room.
    """
    try:
        return json_response(await _store(request, user, workdir))
    except HttpError:
        if "expect" not in request.headers:  # else the body may wait for a word to come
            await _drain(request)
        raise


async def _store(request: Request, user: User, workdir: str | None) -> list[dict[str, object]]:
    metadata = files_metadata.from_headers(request.headers)
    refusal = files_metadata.refusal(metadata)
    if refusal is not None:
        raise HttpError(400, f"invalid metadata: {refusal}")
    body = _body(request)
    given = request.headers.get("content-type", "")
    kind, options = _content_type(given)
    path = request.query_one("path")
    place = _Place(path, user, workdir, metadata, request.content_length)
    if kind == "application/octet-stream":
        if path is None:
            raise HttpError(400, "path query parameter is required for raw body upload")
        return [await _store_bare(body, place)]
    if kind.startswith("multipart/"):
        try:
            return await _store_parts(body, MultipartParser(options.get("boundary", "")), place)
        except MultipartError as error:
            raise HttpError(400, f"error reading form: {error}") from None
    raise HttpError(
        400,
        f"unsupported content type: {given}, expected multipart/form-data or application/octet-stream",
    )


async def _store_bare(body: AsyncGenerator[bytes, None], place: _Place) -> dict[str, object]:
    file = await place.open(None)
    try:
        async for chunk in body:
            file.write(chunk)
        return file.finish()
    except BaseException:
        file.abandon()
        raise


async def _store_parts(
    body: AsyncGenerator[bytes, None], parser: MultipartParser, place: _Place
) -> list[dict[str, object]]:
    stored: list[dict[str, object]] = []
    file: _Upload | None = None
    try:
        async for chunk in body:
            for item in parser.feed(chunk):
                if isinstance(item, Part):
                    if file is not None:
                        stored.append(file.finish())
                        file = None
                    file = await place.open(item) if item.name == "file" else None
                elif file is not None:
                    file.write(item)
        if not parser.finished:
            raise MultipartError("the body ends before the form does")
        if file is not None:
            stored.append(file.finish())
    except BaseException:
        if file is not None:
            file.abandon()
        raise
    return stored


class _Place:
    """Where this request's files go, and what they get."""

    def __init__(
        self, path: str | None, user: User, workdir: str | None, metadata: dict[str, str], size: int | None
    ) -> None:
        self._path = path
        self._user = user
        self._workdir = workdir
        self._metadata = metadata
        self._size = size
        self._taken: set[str] = set()

    async def open(self, part: Part | None) -> _Upload:
        """The file for a part of the form, or for the bare body (None)."""
        given = self._path
        if given is None:
            if part is None or not part.filename:
                raise HttpError(400, "the form's part has no file name, and the query no path")
            given = part.filename
        try:
            path = expand(given, self._user, self._workdir)
        except PathError as error:
            raise HttpError(400, f"error resolving path: {error}") from None
        if path in self._taken:
            raise HttpError(
                400,
                f"you cannot upload multiple files to the same path '{printable(path)}' in one upload "
                "request, only the first specified file was uploaded",
            )
        self._taken.add(path)
        try:
            if make_directories(parent(path), self._user.uid, self._user.gid):
                await checkpoint()  # watches of a tree come to follow the new directory
        except OSError as error:
            raise refuse(error, f"error ensuring directories for '{printable(path)}'") from None
        return _Upload(path, self._user, self._metadata, self._size)


class _Upload:
    """One file on its way in."""

    def __init__(self, path: str, user: User, metadata: dict[str, str], size: int | None) -> None:
        self._path = path
        self._metadata = metadata
        self._size = size
        self._pieces: list[bytes] = []
        self._gathered = 0
        self._fd, self._created = self._open(user)
        self._empty = self._created

    def write(self, data: bytes) -> None:
        """Take some more of the content."""
        self._pieces.append(data)
        self._gathered += len(data)
        if self._gathered >= _GATHER:
            self._flush()

    def finish(self) -> dict[str, object]:
        """Store what is left, and the metadata; what the answer says of this file."""
        self._flush()
        try:
            files_metadata.write_metadata(self._fd, self._metadata)
        except OSError as error:
            raise refuse(error, "error writing file metadata") from None
        told: dict[str, object] = {
            "path": printable(self._path),
            "name": printable(base_name(self._path)),
            "type": "file",
        }
        kept = files_metadata.read_metadata(self._fd)
        if kept:
            told["metadata"] = kept
        self._close()
        return told

    def abandon(self) -> None:
        """Give up; a file that is new goes again. Nothing, when finished."""
        if self._fd < 0:
            return
        if self._created and os.fstat(self._fd).st_nlink:
            try:
                ours, there = os.fstat(self._fd), os.lstat(self._path)
                if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
                    os.unlink(self._path)
            except OSError:
                pass  # moved or removed meanwhile: no longer this upload's
        self._close()

    def _open(self, user: User) -> tuple[int, bool]:
        """The open file, and whether it is new."""
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        created = False
        try:
            try:
                # First without O_CREAT: fs.protected_regular forbids even root to open another's
                # file in /tmp with it.
                fd = os.open(self._path, flags)
            except FileNotFoundError:
                fd, created = self._create(flags)
        except OSError as error:
            raise self._refuse_open(error) from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise HttpError(400, f"path is not a regular file: {printable(self._path)}")
            _hand_over(fd, user)
        except OSError as error:
            os.close(fd)
            raise refuse(error, f"error opening file '{printable(self._path)}'") from None
        except BaseException:
            os.close(fd)
            raise
        return fd, created

    def _create(self, flags: int) -> tuple[int, bool]:
        try:
            return os.open(self._path, flags | os.O_CREAT | os.O_EXCL, _FILE_MODE), True
        except FileExistsError:  # a dangling link, or someone was faster
            return os.open(self._path, flags | os.O_CREAT, _FILE_MODE), False

    def _refuse_open(self, error: OSError) -> HttpError:
        shown = printable(self._path)
        if error.errno == errno.EISDIR:
            return HttpError(400, f"path is a directory: {shown}")
        if error.errno == errno.ENXIO:
            return HttpError(400, f"path is not a regular file: {shown}")
        if error.errno == errno.ENOSPC:
            return HttpError(507, "not enough inodes available")
        return refuse(error, f"error opening file '{shown}'")

    def _flush(self) -> None:
        data = memoryview(self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces))
        self._pieces.clear()
        self._gathered = 0
        try:
            if not self._empty:
                # Only now: together with what follows it is one event for who watches.
                os.ftruncate(self._fd, 0)
                self._empty = True
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            refused = refuse(error, "error writing file")
            if refused.status == 507 and self._size:
                refused = HttpError(507, f"attempted to write {self._size} bytes: {refused.message}")
            raise refused from None

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1


def _hand_over(fd: int, user: User) -> None:
    try:
        os.fchown(fd, user.uid, user.gid)
    except OSError as error:
        # Filesystems without owners (/proc, some mounts) can be written to all the same.
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise


def _content_type(header: str) -> tuple[str, dict[str, str]]:
    try:
        return parameters(header)
    except MultipartError as error:
        raise HttpError(400, f"malformed content type: {error}") from None


def _body(request: Request) -> AsyncGenerator[bytes, None]:
    coding = request.headers.get("content-encoding", "").partition(";")[0].strip().lower()
    if coding in ("", "identity"):
        return _chunks(request)
    if coding in ("gzip", "x-gzip"):
        return _gunzip(request)
    raise HttpError(
        400,
        f"error decompressing request body: unsupported Content-Encoding: {coding}, supported: [gzip]",
    )


async def _chunks(request: Request) -> AsyncGenerator[bytes, None]:
    while chunk := await request.next_chunk():
        yield chunk


async def _gunzip(request: Request) -> AsyncGenerator[bytes, None]:
    """The body decompressed, in pieces of bounded size however well it was compressed."""
    import zlib  # most uploads do without

    decompressor = zlib.decompressobj(31)
    begun = False
    try:
        while data := await request.next_chunk():
            while data:
                if decompressor.eof:
                    decompressor = zlib.decompressobj(31)  # gzip files may follow each other
                piece = decompressor.decompress(data, _GATHER)
                begun = True
                if piece:
                    yield piece
                data = decompressor.unconsumed_tail or decompressor.unused_data
        if tail := decompressor.flush():
            yield tail
    except zlib.error as error:
        raise HttpError(400, f"error decompressing request body: {error}") from None
    if not begun or not decompressor.eof:
        raise HttpError(400, "error decompressing request body: unexpected end")


async def _drain(request: Request) -> None:
    taken = 0
    try:
        while taken < _DRAIN and (chunk := await request.next_chunk()):
            taken += len(chunk)
    except HttpError:
        pass  # the first error is the one to tell
