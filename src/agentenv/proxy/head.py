"""Heads of HTTP/1.1 messages: read strictly, with what decides framing and routing noted.

RFC 9112 sections 2 to 6. Refused although lenient parsers take it: bare CR or LF, folded lines,
blanks before a colon, repeated Content-Length or Host, Content-Length beside Transfer-Encoding,
codings other than chunked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentenv.proxy.framing import Body, Chunked, Malformed, Sized, UntilClose

HEAD_LIMIT = 64 * 1024  # bytes, of requests and of answers
END = b"\r\n\r\n"

Fields = list[tuple[bytes, bytes]]  # (name in lower case, the whole line without its end)

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e\x80-\xff]+) HTTP/([0-9])\.([0-9])\r\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: [\t\x20-\x7e\x80-\xff]*)?\r\n")
_FIELDS = re.compile(rb"(?:" + _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*\r\n)*")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_BAD_START = re.compile(rb"[^!#$%&'*+\-.^_`|~0-9A-Za-z]")
_BARE_LF = re.compile(rb"(?<!\r)\n")

HEADER_PAIRS = (
    (b"e2b-sandbox-id", b"e2b-sandbox-port"),
    (b"x-agentenv-sandbox-id", b"x-agentenv-target-port"),
)
TRAFFIC_TOKEN = b"e2b-traffic-access-token"
_SINGLE = frozenset(
    {b"host", b"content-length", TRAFFIC_TOKEN, *(name for pair in HEADER_PAIRS for name in pair)}
)
_NOTED_OF_REQUESTS = _SINGLE | {
    b"accept",
    b"access-control-request-method",
    b"connection",
    b"expect",
    b"transfer-encoding",
    b"upgrade",
    b"user-agent",
    b"x-forwarded-for",
    b"x-forwarded-proto",
}
_NOTED_OF_ANSWERS = frozenset(
    {
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-connection",
        b"transfer-encoding",
        b"upgrade",
    }
)


class HeadTooLarge(Malformed):
    """A request's head is longer than `HEAD_LIMIT`."""

    status = 431


class VersionRefused(Malformed):
    """The request is of another HTTP version than 1.0 and 1.1."""

    status = 505


class CodingRefused(Malformed):
    """The request's transfer coding is not `chunked`."""

    status = 501


class NeverComplete(Malformed):
    """The client took too long to send a head."""

    status = 408


@dataclass(slots=True)
class RequestHead:
    """A request's head. `path` is in origin form (or `*`), `host` without regard to how it was given."""

    method: bytes
    path: bytes
    host: bytes
    minor: int
    fields: Fields
    noted: dict[bytes, bytes]
    options: frozenset[bytes]

    @property
    def keep_alive(self) -> bool:
        """Whether the client lets the connection go on after this request (HTTP/1.0: never)."""
        return self.minor == 1 and b"close" not in self.options

    @property
    def upgrade(self) -> bytes | None:
        """The protocol that the client asks to change to."""
        return self.noted.get(b"upgrade") if self.minor == 1 and b"upgrade" in self.options else None

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for a 100 before it sends the body."""
        return self.minor == 1 and b"expect" in self.noted


@dataclass(slots=True)
class AnswerHead:
    """The head of a guest's answer; `start` is the whole status line without its end."""

    start: bytes
    status: int
    minor: int
    fields: Fields
    noted: dict[bytes, bytes]
    options: frozenset[bytes]


def never_a_head(data: bytes | bytearray, start: int = 0) -> bool:
    """Whether these first bytes of an unfinished head already show that no valid head comes."""
    return _BAD_START.match(data) is not None or _BARE_LF.search(data, start) is not None


def parse_request(raw: bytes) -> RequestHead:
    """Read a head that ends with the line end of its last line (the empty line left out).

    Raises:
        Malformed: it cannot be trusted; the subclass tells the status to answer with.
    """
    match = _REQUEST_LINE.match(raw)
    if match is None:
        raise Malformed("the request line is malformed")
    method, target, major, minor = match.groups()
    if major != b"1" or minor not in b"01":
        raise VersionRefused("only HTTP/1.1 and HTTP/1.0 are spoken here")
    fields, noted = _read_fields(raw, match.end(), _NOTED_OF_REQUESTS)
    path, authority = _split_target(method, target)
    host = noted.get(b"host")
    if host is None:
        if minor == b"1":
            raise Malformed("the Host header is missing")
        host = b""
    options = _options(noted)
    return RequestHead(method, path, authority or host, int(minor), fields, noted, options)


def parse_answer(raw: bytes) -> AnswerHead:
    """Read the head of an answer, given as for `parse_request`.

    Raises:
        Malformed: it cannot be relayed safely.
    """
    match = _STATUS_LINE.match(raw)
    if match is None:
        raise Malformed("the status line is malformed")
    fields, noted = _read_fields(raw, match.end(), _NOTED_OF_ANSWERS)
    return AnswerHead(raw[: match.end() - 2], int(match[2]), int(match[1]), fields, noted, _options(noted))


def _read_fields(raw: bytes, start: int, noting: frozenset[bytes]) -> tuple[Fields, dict[bytes, bytes]]:
    if _FIELDS.fullmatch(raw, start) is None:
        raise Malformed("a header line is malformed")
    fields: Fields = []
    noted: dict[bytes, bytes] = {}
    if start == len(raw):
        return fields, noted
    for line in raw[start:-2].split(b"\r\n"):
        name, _, value = line.partition(b":")
        name = name.lower()
        fields.append((name, line))
        if name in noting:
            value = value.strip(b" \t")
            if name in noted:
                if name in _SINGLE:
                    raise Malformed(f"the header {name.decode()} is there twice")
                value = noted[name] + b"," + value
            noted[name] = value
    return fields, noted


def _options(noted: dict[bytes, bytes]) -> frozenset[bytes]:
    value = noted.get(b"connection")
    if value is None:
        return frozenset()
    return frozenset(option.strip(b" \t") for option in value.lower().split(b","))


def _split_target(method: bytes, target: bytes) -> tuple[bytes, bytes]:
    """Path and authority of a request target (RFC 9112, 3.2); the authority wins over Host."""
    if target[:1] == b"/":
        return target, b""
    if target == b"*" and method == b"OPTIONS":
        return target, b""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        raise Malformed("the request target is neither a path nor an http URL")
    cut = min((at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0), default=len(rest))
    path = rest[cut:]
    return (path if path[:1] == b"/" else b"/" + path), rest[:cut]


def request_body(head: RequestHead) -> Body | None:
    """How the request's body is framed; None when it has none.

    Raises:
        Malformed: the length is ambiguous or unreadable.
    """
    coding, length = head.noted.get(b"transfer-encoding"), head.noted.get(b"content-length")
    if coding is not None:
        if length is not None:
            raise Malformed("both Content-Length and Transfer-Encoding are given")
        if head.minor == 0:
            raise Malformed("HTTP/1.0 knows no Transfer-Encoding")
        if coding.lower() != b"chunked":
            raise CodingRefused("the only transfer coding taken is chunked")
        return Chunked()
    return _sized(length)


def answer_body(head: AnswerHead, method: bytes) -> Body | None:
    """How the body of the answer to a request of this method is framed; None when it has none.

    Raises:
        Malformed: the length is ambiguous or unreadable.
    """
    if head.status < 200 or head.status in (204, 304) or method == b"HEAD":
        return None
    coding, length = head.noted.get(b"transfer-encoding"), head.noted.get(b"content-length")
    if coding is not None:
        if length is not None or head.minor == 0 or coding.lower() != b"chunked":
            raise Malformed("the answer's Transfer-Encoding is ambiguous")
        return Chunked()
    return _sized(length) if length is not None else UntilClose()


def _sized(length: bytes | None) -> Sized | None:
    if length is None:
        return None
    if _LENGTH.fullmatch(length) is None:
        raise Malformed("Content-Length is not one number")
    size = int(length)
    return Sized(size) if size else None
