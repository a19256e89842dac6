"""HTTP messages and routes, without I/O: requests, responses, their heads, and who answers what.

What is served is HTTP/1.1 as of RFC 9112, in the part that real clients send: no obsolete line folding,
no transfer coding but chunked. The connection that carries it is in `server.py`.
"""

from __future__ import annotations

from binascii import unhexlify

from agentenv.guest.lean import dump_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
    from typing import Any, Protocol

    class BodySource(Protocol):
        """Where a request's body comes from; `server.Connection` is one."""

        async def next_chunk(self) -> bytes: ...

    Handler = Callable[["Request"], Awaitable["Response"]]

MAX_HEAD = 64 * 1024
REASONS = {
    200: "OK",
    201: "Created",
    204: "No Content",
    206: "Partial Content",
    304: "Not Modified",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    411: "Length Required",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    416: "Range Not Satisfiable",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
    507: "Insufficient Storage",
}
CORS_EXPOSED = (
    "Location, Cache-Control, X-Content-Type-Options, Content-Encoding, Content-Range, X-Envd-Version"
)


class ClientGone(Exception):
    """The client closed or broke its connection before the exchange was over."""


class HttpError(Exception):
    """Ends a request with a status and the body `{"code": status, "message": message}`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class FileSpan:
    """A response body that is `length` bytes of an open file from `offset`.

    The kernel sends it (sendfile); the server closes `fd` afterwards, in every case.
    """

    __slots__ = ("fd", "length", "offset")

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self.fd = fd
        self.offset = offset
        self.length = length


class FinalChunk(bytes):
    """An iterator body's last item: it goes out together with the end mark, in one write."""

    __slots__ = ()


class Request:
    """One request. `headers` has lowercased names; values repeated under one name are joined by ", "."""

    __slots__ = (
        "_query",
        "_source",
        "content_length",
        "headers",
        "method",
        "peer",
        "raw_path",
        "target",
        "version",
    )

    def __init__(self, method: str, target: str, version: str, headers: dict[str, str]) -> None:
        self.method = method
        self.target = target
        self.version = version
        self.headers = headers
        self.raw_path = _path_of(target)
        self.content_length: int | None = None
        self.peer = ""
        self._query: dict[str, list[str]] | None = None
        self._source: BodySource | None = None

    @property
    def path(self) -> str:
        """The path, percent-decoded, without the query."""
        return query_decode(self.raw_path) if "%" in self.raw_path else self.raw_path

    @property
    def query(self) -> dict[str, list[str]]:
        """The query's fields, each with its values in order."""
        if self._query is None:
            self._query = parse_query(self.target.partition("#")[0].partition("?")[2])
        return self._query

    def query_one(self, name: str) -> str | None:
        """The first value of a query field, or None."""
        values = self.query.get(name)
        return values[0] if values else None

    async def next_chunk(self) -> bytes:
        """Some more of the body, as it arrives; b"" at its end.

        Raises:
            ClientGone: the connection ended before the body did.
            HttpError: 400, the body's framing is broken.
        """
        return b"" if self._source is None else await self._source.next_chunk()

    async def read(self, limit: int) -> bytes:
        """The whole body; 413 when it has more than `limit` bytes."""
        if self.content_length is not None and self.content_length > limit:
            raise HttpError(413, f"the request's body is larger than {limit} bytes")
        first = await self.next_chunk()
        if not first or len(first) == self.content_length:
            return first
        parts, size = [first], len(first)
        while chunk := await self.next_chunk():
            size += len(chunk)
            if size > limit:
                raise HttpError(413, f"the request's body is larger than {limit} bytes")
            parts.append(chunk)
        return b"".join(parts)


class Response:
    """An answer.

    Args:
        body: bytes (Content-Length is set, also for none); or an async iterator of bytes, sent chunked,
            each item at once (an empty one sends the head alone; a tuple is one item in pieces; after a
            FinalChunk none is asked for) and closed in every case; or a FileSpan.
        length: the number of bytes that an iterator will give; then it is sent with Content-Length.
    """

    __slots__ = ("body", "content_type", "headers", "length", "status")

    def __init__(
        self,
        status: int = 200,
        body: bytes | AsyncIterator[bytes] | AsyncIterator[bytes | tuple[bytes, ...]] | FileSpan = b"",
        content_type: str | None = None,
        headers: Iterable[tuple[str, str]] = (),
        length: int | None = None,
    ) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = headers
        self.length = length


class Router:
    """Which handler answers a method and an exact path."""

    def __init__(self) -> None:
        self._routes: dict[str, dict[str, Handler]] = {}

    def add(self, method: str, path: str, handler: Handler) -> None:
        self._routes.setdefault(path, {})[method] = handler

    def find(self, request: Request) -> Handler:
        """The handler; HttpError 404 or 405 when there is none. HEAD is answered by GET's."""
        methods = self._routes.get(request.raw_path)
        if methods is None:
            raise HttpError(404, f"no such path: {request.raw_path}")
        handler = methods.get(request.method)
        if handler is None and request.method == "HEAD":
            handler = methods.get("GET")
        if handler is None:
            raise HttpError(405, f"{request.method} is not a method of {request.raw_path}")
        return handler


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(status, dump_json(value), "application/json")


def error_response(error: HttpError) -> Response:
    """The answer that an HttpError stands for."""
    return json_response({"code": error.status, "message": error.message}, error.status)


def parse_head(head: bytes) -> Request:
    """A request from the bytes of its head (without the empty line).

    Raises:
        HttpError: 400 for what is malformed, 505 for another version than 1.0 and 1.1.
    """
    line, *lines = head.decode("latin-1").split("\r\n")
    words = line.split(" ")
    if len(words) != 3 or not (words[0].isascii() and words[0].isalpha()) or not words[1]:
        raise HttpError(400, "malformed request line")
    method, target, version = words
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise HttpError(
            505 if version.startswith("HTTP/") else 400, "only HTTP/1.0 and HTTP/1.1 are spoken here"
        )
    headers: dict[str, str] = {}
    for field in lines:
        name, colon, value = field.partition(":")
        if not colon or not name or name[-1] in " \t" or name[0] in " \t" or "\n" in field or "\0" in field:
            raise HttpError(400, "malformed header field")
        name = name.lower()
        value = value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return Request(method, target, version, headers)


_LENGTH_DIGITS = 18  # more than any file has


def body_framing(headers: dict[str, str]) -> tuple[bool, int]:
    """How a request's body is delimited: (chunked, length in bytes).

    Raises:
        HttpError: 400 for contradicting or malformed headers, 501 for an unknown coding.
    """
    coding = headers.get("transfer-encoding")
    length = headers.get("content-length")
    if coding is not None:
        if length is not None:
            raise HttpError(400, "both Transfer-Encoding and Content-Length are given")
        if coding.lower() != "chunked":
            raise HttpError(501, f"transfer coding {coding!r} is not supported")
        return True, 0
    if length is None:
        return False, 0
    if not (length.isascii() and length.isdigit() and len(length) <= _LENGTH_DIGITS):
        raise HttpError(400, f"Content-Length {length[:_LENGTH_DIGITS]!r} is not a number of bytes")
    return False, int(length)


def response_head(response: Response, request: Request | None, framing: str, keep: bool) -> bytes:
    """The bytes of a response's head; `framing` is its Content-Length or Transfer-Encoding field."""
    status = response.status
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}"]
    if response.content_type is not None:
        lines.append(f"content-type: {response.content_type}")
    if framing:
        lines.append(framing)
    lines += [f"{name}: {value}" for name, value in response.headers]
    if request is not None and "origin" in request.headers:
        lines.append(f"access-control-allow-origin: *\r\naccess-control-expose-headers: {CORS_EXPOSED}")
    if not keep:
        lines.append("connection: close")
    lines.append("\r\n")
    return "\r\n".join(lines).encode("latin-1", "replace")


def preflight_response(request: Request) -> Response:
    """The answer to OPTIONS: everything is allowed to everyone (the token is what guards)."""
    asked = request.headers.get("access-control-request-headers", "*")
    return Response(
        204,
        headers=(
            ("access-control-allow-methods", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
            ("access-control-allow-headers", asked),
            ("access-control-max-age", "7200"),
        ),
    )


def wants_close(request: Request) -> bool:
    """Whether the client means this request to be the connection's last."""
    connection = request.headers.get("connection")
    if request.version == "HTTP/1.0":
        return connection is None or "keep-alive" not in connection.lower()
    return connection is not None and "close" in connection.lower()


def query_decode(text: str) -> str:
    """Percent-decodes; bytes that are not UTF-8 become surrogates, as in file names."""
    first, *rest = text.encode("latin-1", "replace").split(b"%")
    parts = [first]
    for piece in rest:
        try:
            parts += (unhexlify(piece[:2]) or b"%", piece[2:])
        except ValueError:  # not an escape after all: stays as it is
            parts += (b"%", piece)
    return b"".join(parts).decode("utf-8", "surrogateescape")


def parse_query(text: str) -> dict[str, list[str]]:
    """The fields of a query string; `+` is a space."""
    fields: dict[str, list[str]] = {}
    for pair in text.split("&"):
        if pair:
            name, _, value = pair.replace("+", " ").partition("=")
            fields.setdefault(query_decode(name), []).append(query_decode(value))
    return fields


def _path_of(target: str) -> str:
    if not target.startswith("/"):  # absolute form, as for proxies
        scheme, separator, rest = target.partition("://")
        if separator and scheme.lower() in ("http", "https"):
            slash = rest.find("/")
            target = rest[slash:] if slash >= 0 else "/"
    return target.partition("#")[0].partition("?")[0]
