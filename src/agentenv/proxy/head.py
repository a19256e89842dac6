"""Heads of HTTP/1.1 messages: read strictly, with what decides framing and routing noted.

RFC 9112 sections 2 to 6. Refused although lenient parsers take it: bare CR or LF, folded lines,
blanks before a colon, repeated Content-Length or Host, Content-Length beside Transfer-Encoding,
codings other than chunked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from agentenv.proxy.framing import Body, Chunked, Malformed, Sized, UntilClose

END = b"\r\n\r\n"
HOST_LIMIT = 512  # bytes; names have up to 253 (RFC 1035, 2.3.4), and a port may follow
LENGTH_DIGITS = 18  # the most that a Content-Length may have
REMEMBERED_LIMIT = 4096  # bytes of fields that are kept to be recognised

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e\x80-\xff]+) HTTP/([0-9])\.([0-9])\r\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: [\t\x20-\x7e\x80-\xff]*)?\r\n")
_FIELDS = re.compile(rb"(?:" + _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*\r\n)*")
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

# Fields that end at each hop (RFC 9110, 7.6.1), whatever Connection names.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"upgrade",
    }
)
_NOT_FOR_GUESTS = _HOP_BY_HOP | {
    TRAFFIC_TOKEN,
    b"host",
    b"x-agentenv-sandbox-id",
    b"x-agentenv-target-port",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
}
# Named in Connection these stay all the same: a body would lose its end, or a request its check.
_NEVER_NOMINATED = _SINGLE | {b"transfer-encoding", b"x-access-token"}


def _fields_to_find(names: frozenset[bytes]) -> re.Pattern[bytes]:
    """Finds these fields in a head in lower case; each match leaves its line end to the next."""
    return re.compile(rb"\n(" + b"|".join(sorted(names)) + rb"):([^\r]*)\r")


_OF_REQUESTS = _fields_to_find(_NOT_FOR_GUESTS | _SINGLE | {b"expect", b"transfer-encoding"})
_OF_ANSWERS = _fields_to_find(_HOP_BY_HOP | {b"content-length", b"transfer-encoding"})


class HeadTooLarge(Malformed):
    """A request's head is longer than may be."""

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


class Fields(NamedTuple):
    """What the field lines of a head say; see `RequestHead` for the parts."""

    kept: bytes
    noted: Mapping[bytes, bytes]
    options: frozenset[bytes]


Head = TypeVar("Head", "RequestHead", "AnswerHead")


class Memory(Generic[Head]):
    """A connection's last head, and its fields: the next one often has the very same, or is the same."""

    __slots__ = ("fields", "head", "lines", "raw")

    def __init__(self) -> None:
        self.raw = self.lines = b""
        self.head: Head | None = None
        self.fields = Fields(b"", {}, _NONE)

    def keep(self, raw: bytes, head: Head) -> Head:
        """Remember a whole head, if it is not too long; returns it."""
        if len(raw) <= REMEMBERED_LIMIT:
            self.raw, self.head = raw, head
        return head


_NONE: frozenset[bytes] = frozenset()


@dataclass(slots=True)
class RequestHead:
    """A request's head. It is not changed: the same one is given for equal bytes.

    `path` is in origin form (or `*`); `host` is the target's, however it was given; `kept` are the
    lines of the fields that a guest may see, each with its line end before it; `noted` are the
    fields that this proxy looks at, by name in lower case; `options` are those of Connection.
    """

    raw: bytes
    method: bytes
    path: bytes
    host: bytes
    minor: int
    kept: bytes
    noted: Mapping[bytes, bytes]
    options: frozenset[bytes]

    @property
    def keep_alive(self) -> bool:
        """Whether the client lets the connection go on after this request (HTTP/1.0: never)."""
        return self.minor == 1 and b"close" not in self.options

    @property
    def upgrade(self) -> bytes | None:
        """The protocol that the client asks to change to."""
        return self.noted.get(b"upgrade") if self.minor == 1 and b"upgrade" in self.options else None

    def value(self, name: bytes) -> bytes:
        """The value of the first field of that name (in lower case), noted or not; empty if there is none."""
        at = self.raw.lower().find(b"\n" + name + b":")
        if at < 0:
            return b""
        start = at + len(name) + 2
        return self.raw[start : self.raw.index(b"\r", start)].strip(b" \t")

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for a 100 before it sends the body."""
        return self.minor == 1 and b"expect" in self.noted


@dataclass(slots=True)
class AnswerHead:
    """The head of a guest's answer; `start` is the status line without its end, the rest as in requests.

    It is not changed either."""

    start: bytes
    status: int
    minor: int
    kept: bytes
    noted: Mapping[bytes, bytes]
    options: frozenset[bytes]


def never_a_head(data: bytes | bytearray, start: int = 0) -> bool:
    """Whether these first bytes of an unfinished head already show that no valid head comes."""
    return _BAD_START.match(data) is not None or _BARE_LF.search(data, start) is not None


def parse_request(raw: bytes, memory: Memory[RequestHead] | None = None) -> RequestHead:
    """Read a head that ends with the line end of its last line (the empty line left out).

    Args:
        raw: the head.
        memory: of the connection that it came on.

    Raises:
        Malformed: it cannot be trusted; the subclass tells the status to answer with.
    """
    if memory is not None and memory.head is not None and raw == memory.raw:
        return memory.head
    match = _REQUEST_LINE.match(raw)
    if match is None:
        raise Malformed("the request line is malformed")
    method, target, major, minor = match.groups()
    if major != b"1" or minor not in b"01":
        raise VersionRefused("only HTTP/1.1 and HTTP/1.0 are spoken here")
    kept, noted, options = _fields(raw[match.end() - 2 :], memory, _OF_REQUESTS, _NOT_FOR_GUESTS)
    host = noted.get(b"host")
    if host is None:
        if minor == b"1":
            raise Malformed("the Host header is missing")
        host = b""
    path = target
    if target[:1] != b"/":
        path, authority = _split_target(method, target)
        host = authority or host
    if len(host) > HOST_LIMIT:
        raise Malformed("the host is longer than a name can be")
    head = RequestHead(raw, method, path, host, 1 if minor == b"1" else 0, kept, noted, options)
    return head if memory is None else memory.keep(raw, head)


def parse_answer(raw: bytes, memory: Memory[AnswerHead] | None = None) -> AnswerHead:
    """Read the head of an answer, given as for `parse_request`.

    Raises:
        Malformed: it cannot be relayed safely.
    """
    if memory is not None and memory.head is not None and raw == memory.raw:
        return memory.head
    match = _STATUS_LINE.match(raw)
    if match is None:
        raise Malformed("the status line is malformed")
    end = match.end()
    kept, noted, options = _fields(raw[end - 2 :], memory, _OF_ANSWERS, _HOP_BY_HOP)
    minor = 1 if match[1] == b"1" else 0
    head = AnswerHead(raw[: end - 2], int(match[2]), minor, kept, noted, options)
    return head if memory is None else memory.keep(raw, head)


def _fields(
    lines: bytes,
    memory: Memory[RequestHead] | Memory[AnswerHead] | None,
    find: re.Pattern[bytes],
    dropped: frozenset[bytes],
) -> Fields:
    if memory is not None and lines == memory.lines:
        return memory.fields
    fields = _read_fields(lines, find, dropped)
    if memory is not None and len(lines) <= REMEMBERED_LIMIT:
        memory.lines, memory.fields = lines, fields
    return fields


def _read_fields(raw: bytes, find: re.Pattern[bytes], dropped: frozenset[bytes]) -> Fields:
    """Check all field lines, given with the line end before them, and look at those that `find` finds.

    Only the fields of interest cost time in Python; the others are checked and copied in one go.
    """
    if _FIELDS.fullmatch(raw, 2) is None:
        raise Malformed("a header line is malformed")
    noted: dict[bytes, bytes] = {}
    kept: list[bytes] = []
    position = 0
    for match in find.finditer(raw.lower()):
        name = match[1]
        begin, end = match.span(2)
        value = raw[begin:end].strip(b" \t")
        if name in noted:
            if name in _SINGLE:
                raise Malformed(f"the header {name.decode()} is there twice")
            value = noted[name] + b"," + value
        noted[name] = value
        if name in dropped:
            kept.append(raw[position : match.start() - 1])
            position = end
    kept.append(raw[position:-2])
    options = _options(noted[b"connection"]) if b"connection" in noted else _NONE
    rest = b"".join(kept)
    return Fields(rest if options <= _USUAL else _without(rest, options), noted, options)


_USUAL = frozenset({b"close", b"keep-alive", b"upgrade"})


def _options(value: bytes) -> frozenset[bytes]:
    return frozenset(option.strip(b" \t") for option in value.lower().split(b","))


def _without(lines: bytes, options: frozenset[bytes]) -> bytes:
    """The lines without the fields that Connection names."""
    dropped = options - _NEVER_NOMINATED
    return b"\r\n".join(
        line for line in lines.split(b"\r\n") if line.partition(b":")[0].lower() not in dropped
    )


def _split_target(method: bytes, target: bytes) -> tuple[bytes, bytes]:
    """Path and authority of a request target (RFC 9112, 3.2); the authority wins over Host."""
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
    if not length.isdigit() or len(length) > LENGTH_DIGITS:
        raise Malformed("Content-Length is not one number")
    size = int(length)
    return Sized(size) if size else None
