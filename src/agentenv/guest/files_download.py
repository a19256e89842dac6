"""`GET /files`: one file's bytes, whole, in part, or compressed."""

from __future__ import annotations

import os
import stat

from agentenv.guest.files import refuse
from agentenv.guest.files_negotiation import (
    NotAcceptable,
    Unsatisfiable,
    accepts,
    byte_range,
    content_type,
    disposition,
    http_date,
    parse_http_date,
)
from agentenv.guest.http import FileSpan, HttpError, Response
from agentenv.guest.loop import checkpoint
from agentenv.guest.paths import base_name, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from agentenv.guest.http import Request

    Headers = list[tuple[str, str]]

# Up to this many bytes a file is read at once and sent with what was read: files of /proc and /sys
# do not have the size that they claim.
_SMALL = 256 * 1024

# The fastest level: a guest under emulation compresses slower than it sends.
_GZIP_LEVEL = 1


def download(request: Request, path: str) -> Response:
    """The answer for the file at `path`, which is absolute.

    Raises:
        HttpError: 404 there is none, 400 it is a directory or no regular file, 406 the client
            accepts no coding that there is.
    """
    found = _stat(path)
    try:
        gzip, plain = accepts(request.headers.get("accept-encoding"))
        if request.method == "HEAD":
            gzip = False
        if _is_partial(request):
            if not plain:
                raise NotAcceptable("identity encoding not acceptable for Range or conditional request")
            gzip = False
    except NotAcceptable as error:
        raise HttpError(406, str(error)) from None
    modified = http_date(found.st_mtime)
    headers = [
        ("vary", "Accept-Encoding"),
        ("content-disposition", disposition(base_name(path), os.fsencode(base_name(path)))),
        ("last-modified", modified),
    ]
    if _not_modified(request, found.st_mtime):
        return Response(304, headers=headers)
    fd = _open(path)
    try:
        first = _read(fd, _SMALL + 1)
        kind = content_type(path, first)
        if gzip:
            return _compressed(fd, first, kind, headers)
        size = os.fstat(fd).st_size
        if len(first) > _SMALL and size <= _SMALL:
            return Response(200, _FileBody(fd, first, gzip=False), kind, headers)
        whole = first if len(first) <= _SMALL else None
        return _plain(request, fd, whole, size, kind, headers, modified)
    except BaseException:
        os.close(fd)
        raise


def _plain(
    request: Request, fd: int, whole: bytes | None, size: int, kind: str, headers: Headers, modified: str
) -> Response:
    """The file, or the part asked for: from memory when `whole` is given, else by the kernel."""
    if whole is not None:
        size = len(whole)
    headers.append(("accept-ranges", "bytes"))
    condition = request.headers.get("if-range")
    asked = request.headers.get("range") if condition is None or condition.strip() == modified else None
    status, offset, length = 200, 0, size
    try:
        part = byte_range(asked, size)
    except Unsatisfiable as error:
        os.close(fd)
        headers.append(("content-range", f"bytes */{size}"))
        message = f'{{"code":416,"message":"{error}"}}'
        return Response(416, message.encode(), "application/json", headers)
    if part is not None:
        status, (offset, length) = 206, part
        headers.append(("content-range", f"bytes {offset}-{offset + length - 1}/{size}"))
    if whole is None:
        return Response(status, FileSpan(fd, offset, length), kind, headers)
    os.close(fd)
    return Response(status, whole[offset : offset + length], kind, headers)


def _compressed(fd: int, first: bytes, kind: str, headers: Headers) -> Response:
    import zlib  # most downloads do without

    headers.append(("content-encoding", "gzip"))
    if len(first) <= _SMALL:
        os.close(fd)
        return Response(200, zlib.compress(first, _GZIP_LEVEL, 31), kind, headers)
    return Response(200, _FileBody(fd, first, gzip=True), kind, headers)


class _FileBody:
    """What was read of a file, then the rest of it; compressed when told so.

    An object and not a generator: a generator that is closed before it begins runs no `finally`.
    """

    def __init__(self, fd: int, first: bytes, *, gzip: bool) -> None:
        self._fd = fd
        self._data = first
        self._compressor: Any = None
        if gzip:
            import zlib

            self._compressor = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, 31)

    def __aiter__(self) -> _FileBody:
        return self

    async def __anext__(self) -> bytes:
        await checkpoint()
        while data := self._data:
            self._data = _read(self._fd, _SMALL)
            if self._compressor is None:
                return data
            if compressed := self._compressor.compress(data):
                return bytes(compressed)
            await checkpoint()
        if self._compressor is None:
            raise StopAsyncIteration
        end, self._compressor = self._compressor.flush(), None
        return bytes(end)

    async def aclose(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _stat(path: str) -> os.stat_result:
    shown = printable(path)
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise HttpError(404, f"path '{shown}' does not exist") from None
    except OSError as error:
        raise refuse(error, f"error checking if path exists '{shown}'") from None
    if stat.S_ISDIR(found.st_mode):
        raise HttpError(400, f"path '{shown}' is a directory")
    if not stat.S_ISREG(found.st_mode):
        # A pipe or device may never end, or wait for ever.
        raise HttpError(400, f"path '{shown}' is not a regular file")
    return found


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise refuse(error, f"error opening file '{printable(path)}'") from None


def _read(fd: int, size: int) -> bytes:
    """Up to `size` bytes; fewer only at the end, or where nothing is to be had without waiting."""
    pieces: list[bytes] = []
    while size:
        try:
            piece = os.read(fd, size)
        except BlockingIOError:
            break
        except OSError as error:
            raise HttpError(500, f"error reading file: {error.strerror}") from None
        if not piece:
            break
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _is_partial(request: Request) -> bool:
    headers = request.headers
    return any(name in headers for name in ("range", "if-range", "if-modified-since", "if-none-match"))


def _not_modified(request: Request, modified: float) -> bool:
    since = request.headers.get("if-modified-since")
    if since is None or "if-none-match" in request.headers:
        return False
    moment = parse_http_date(since)
    return moment is not None and int(modified) <= moment
