"""What a client's headers ask of a download: which coding, which bytes, under which condition.

Sources: RFC 9110, sections 12.5.3 (Accept-Encoding), 13 (conditions) and 14 (ranges). The answers
are those of E2B's server where the standard leaves a choice.
"""

from __future__ import annotations

import time

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

# What browsers show; everything else is told by its first bytes.
_TYPES = {
    "css": "text/css; charset=utf-8",
    "csv": "text/csv; charset=utf-8",
    "gif": "image/gif",
    "htm": "text/html; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "jpeg": "image/jpeg",
    "jpg": "image/jpeg",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "md": "text/markdown; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "mp4": "video/mp4",
    "pdf": "application/pdf",
    "png": "image/png",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "wasm": "application/wasm",
    "webp": "image/webp",
    "xml": "text/xml; charset=utf-8",
    "zip": "application/zip",
}
OCTETS = "application/octet-stream"
_TEXT = "text/plain; charset=utf-8"
_SAMPLE = 512
_CONTROL = frozenset(range(32)) - frozenset(b"\t\n\x0c\r\x1b")


class NotAcceptable(ValueError):
    """The client refuses every coding that there is: 406."""


class Unsatisfiable(ValueError):
    """No byte of the file is in the range: 416."""


def accepts(header: str | None) -> tuple[bool, bool]:
    """Whether `Accept-Encoding` allows (gzip to be sent, the plain bytes to be sent).

    Gzip is sent only to a client that asks for it alone. HTTP libraries offer a list of codings by
    themselves with every request; compressing for them would cost a guest under emulation far
    more than it saves, and a server may always choose the plain bytes.

    Raises:
        NotAcceptable: neither.
    """
    if not header:
        return False, True
    weights: dict[str, float] = {}
    for item in header.split(","):
        coding, _, rest = item.partition(";")
        weights[coding.strip().lower()] = _weight(rest)
    weights.pop("", None)
    plain = weights.get("identity", weights.get("*", 1.0) or 0.0) > 0
    gzip = weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0))) > 0
    others = any(
        weight > 0 and coding not in ("gzip", "x-gzip", "identity", "*") for coding, weight in weights.items()
    )
    named = weights.get("gzip", weights.get("x-gzip", 0.0))
    wanted = named > 0 and not others and named >= weights.get("identity", 0.0)
    if not plain and not gzip:
        raise NotAcceptable("no acceptable encoding found, supported: gzip, identity")
    return wanted or not plain, plain


def _weight(text: str) -> float:
    for parameter in text.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 1.0
    return 1.0


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The (offset, length) that `Range` asks for; None to send everything.

    Everything is sent for an empty file, for several ranges at once and for what is no byte range,
    as the standard allows.

    Raises:
        Unsatisfiable: the range is well formed but begins after the end.
    """
    if not header or not size:
        return None
    unit, _, text = header.partition("=")
    if unit.strip().lower() != "bytes" or "," in text:
        return None
    first, dash, last = (word.strip() for word in text.partition("-"))
    if not dash or not all(not word or (word.isascii() and word.isdigit()) for word in (first, last)):
        return None
    if not first:
        if not last:
            return None
        length = min(int(last), size)
        if not length:
            raise Unsatisfiable("the range holds no bytes")
        return size - length, length
    offset = int(first)
    end = int(last) if last else max(offset, size - 1)
    if end < offset:
        return None
    if offset >= size:
        raise Unsatisfiable(f"the range begins after the end: the file has {size} bytes")
    return offset, min(end, size - 1) - offset + 1


def http_date(seconds: float) -> str:
    """Unix time as HTTP writes it: "Sun, 06 Nov 1994 08:49:37 GMT"."""
    year, month, day, hour, minute, second, weekday, _, _ = time.gmtime(int(seconds))
    return f"{_DAYS[weekday]}, {day:02} {_MONTHS[month - 1]} {year:04} {hour:02}:{minute:02}:{second:02} GMT"


def parse_http_date(text: str) -> int | None:
    """Unix time of an HTTP date; None for the two obsolete forms and for nonsense."""
    try:
        _, day, month, year, clock, zone = text.split()
        hour, minute, second = (int(part) for part in clock.split(":"))
        if zone != "GMT":
            return None
        date = (int(year), _MONTHS.index(month) + 1, int(day))
        return _seconds(date, hour * 3600 + minute * 60 + second)
    except ValueError:
        return None


def _seconds(date: tuple[int, int, int], seconds: int) -> int:
    # Days of the proleptic Gregorian calendar, years beginning in March; calendar.timegm is not
    # worth an import of datetime.
    year, month, day = date
    if month <= 2:
        year, month = year - 1, month + 12
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * month - 457) // 5 + day - 719469
    return days * 86400 + seconds


def content_type(name: str, sample: bytes) -> str:
    """The media type by the name's extension, else text or octets by the first bytes."""
    extension = name.rpartition(".")[2].lower() if "." in name else ""
    known = _TYPES.get(extension)
    if known is not None:
        return known
    sample = sample[:_SAMPLE]
    if not _CONTROL.isdisjoint(sample):
        return OCTETS
    try:
        sample.decode("utf-8")
    except UnicodeDecodeError as error:
        # A character that the end of the sample cuts is no reason.
        if error.reason != "unexpected end of data":
            return OCTETS
    return _TEXT


def disposition(name: str, raw: bytes) -> str:
    """`Content-Disposition: inline` with the file's name; `raw` is the name as bytes."""
    if name and all(letter.isalnum() or letter in "!#$%&'*+-.^_`|~" for letter in name) and name.isascii():
        return f"inline; filename={name}"
    if name.isascii() and name.isprintable():
        escaped = name.replace("\\", "\\\\").replace('"', '\\"')
        return f'inline; filename="{escaped}"'
    encoded = "".join(
        chr(byte) if (chr(byte).isalnum() and byte < 128) or byte in b"!#$&+-.^_`|~" else f"%{byte:02X}"
        for byte in raw
    )
    return f"inline; filename*=utf-8''{encoded}"
