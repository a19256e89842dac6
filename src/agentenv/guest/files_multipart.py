"""multipart/form-data (RFC 7578) as it arrives: bytes in, parts and their content out.

Nothing is kept but the end of the last bytes that may be the beginning of a boundary, so a part of
any size passes in bounded memory. File names keep their directories, which other parsers strip:
E2B's clients send whole paths.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGEST_HEAD = 16 * 1024
_LONGEST_BOUNDARY = 200
_LONGEST_PADDING = 80

# Characters that a backslash escapes inside a quoted value, as Go's mime package reads them (it is
# what E2B's server uses): before others it stands for itself, since some clients do not escape it.
_SPECIAL = frozenset('()<>@,;:\\"/[]?=')

_PREAMBLE, _DELIMITER, _HEAD, _CONTENT, _EPILOGUE = range(5)


class MultipartError(ValueError):
    """The body is not what its Content-Type promises."""


class Part:
    """The head of one part.

    Attributes:
        name: the form field's name, or None.
        filename: the file name with its directories, or None when there is none.
    """

    __slots__ = ("filename", "name")

    def __init__(self, name: str | None, filename: str | None) -> None:
        self.name = name
        self.filename = filename


class MultipartParser:
    """Feed it the body; it gives `Part` where one begins and bytes for its content.

    Args:
        boundary: the Content-Type's parameter of that name.
    """

    def __init__(self, boundary: str) -> None:
        if not boundary or len(boundary) > _LONGEST_BOUNDARY:
            raise MultipartError("the Content-Type names no usable boundary")
        self._delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._buffer = b"\r\n"  # the line end that the first delimiter lacks
        self._state = self._before = _PREAMBLE

    @property
    def finished(self) -> bool:
        """Whether the closing delimiter has been seen."""
        return self._state == _EPILOGUE

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        """What `data` brings, in order; to be taken to its end before the next call.

        Raises:
            MultipartError: a part's head is malformed or too long.
        """
        self._buffer += data
        more = True
        while more:
            state = self._state
            item: Part | bytes | None
            if state == _HEAD:
                item = self._take_head()
                more = item is not None
            elif state == _DELIMITER:
                item, more = self._take_delimiter()
            elif state == _EPILOGUE:
                self._buffer = b""
                return
            else:
                item, more = self._take_content()
                if state == _PREAMBLE:
                    item = None
            if item:
                yield item

    def _take_content(self) -> tuple[bytes, bool]:
        """Content up to the next delimiter, and whether there was one."""
        buffer = self._buffer
        found = buffer.find(self._delimiter)
        if found >= 0:
            self._before, self._state = self._state, _DELIMITER
            self._buffer = buffer[found + len(self._delimiter) :]
            return buffer[:found], True
        # Only what may be the beginning of a delimiter waits for more.
        held = buffer.rfind(b"\r", max(0, len(buffer) - len(self._delimiter) + 1))
        if held < 0:
            held = len(buffer)
        self._buffer = buffer[held:]
        return buffer[:held], False

    def _take_delimiter(self) -> tuple[bytes | None, bool]:
        """What follows a delimiter decides: the end, a part, or it was only content like one."""
        buffer = self._buffer
        if buffer.startswith(b"--"):
            self._state = _EPILOGUE
            return None, True
        padded = buffer.lstrip(b" \t")
        if padded.startswith(b"\r\n"):
            # The line end stays: a part without a head is then an empty line like any other.
            self._buffer = padded
            self._state = _HEAD
            return None, True
        if len(buffer) < _LONGEST_PADDING and (padded in (b"", b"\r") or buffer == b"-"):
            return None, False
        self._state = self._before
        return (self._delimiter if self._state == _CONTENT else None), True

    def _take_head(self) -> Part | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end > _LARGEST_HEAD or (end < 0 and len(self._buffer) > _LARGEST_HEAD):
            raise MultipartError(f"a part's head is larger than {_LARGEST_HEAD} bytes")
        if end < 0:
            return None
        head = self._buffer[:end].decode("utf-8", "surrogateescape")
        # The second line end stays: an empty part ends with a delimiter that begins with it.
        self._buffer = self._buffer[end + 4 :]
        self._state = _CONTENT
        return _part(head)


def parameters(value: str) -> tuple[str, dict[str, str]]:
    """A header's value and its parameters: `form-data; name="file"`. Names and value in lower case.

    Quoted values may hold anything; `name*=utf-8''…` (RFC 8187) wins over `name=`.
    """
    main, _, rest = value.partition(";")
    found: dict[str, str] = {}
    extended: dict[str, str] = {}
    while rest:
        name, equals, rest = rest.partition("=")
        name = name.strip(" \t;").lower()
        if not equals:
            break
        rest = rest.lstrip(" \t")
        if rest.startswith('"'):
            text, rest = _quoted(rest)
        else:
            text, _, rest = rest.partition(";")
            text = text.strip()
        if name.endswith("*"):
            extended[name[:-1]] = _extended(text)
        else:
            found.setdefault(name, text)
    return main.strip().lower(), found | extended


def _part(head: str) -> Part:
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            kind, found = parameters(value)
            return Part(found.get("name") if kind == "form-data" else None, found.get("filename"))
    return Part(None, None)


def _quoted(text: str) -> tuple[str, str]:
    """The content of the quoted string that `text` begins with, and what follows it."""
    letters: list[str] = []
    at = 1
    while at < len(text):
        letter = text[at]
        if letter == '"':
            return "".join(letters), text[at + 1 :].lstrip(" \t;")
        if letter == "\\" and text[at + 1 : at + 2] in _SPECIAL:
            at += 1
            letter = text[at]
        letters.append(letter)
        at += 1
    raise MultipartError("a quoted value in a part's head does not end")


def _extended(text: str) -> str:
    from agentenv.guest.http import query_decode

    charset, _, rest = text.partition("'")
    if charset.lower() not in ("utf-8", "us-ascii"):
        return text
    return query_decode(rest.partition("'")[2])
