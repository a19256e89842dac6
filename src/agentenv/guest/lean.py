"""The C halves of a few standard modules, under the names of the whole.

Their Python halves are most of what a small program imports: `json`, `socket`, `signal` and `contextlib`
bring `re`, `enum`, `functools` and `collections` with them, 25 ms on a host, several times that in an
emulated guest. The agent needs none of what they add, but for `Socket.accept` and JSON's functions, which
are below.
"""

from __future__ import annotations

import _json
from os import set_blocking

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as signal
    import socket as socket
    from collections import deque as deque
    from heapq import heapify as heapify
    from heapq import heappop as heappop
    from heapq import heappush as heappush
    from hmac import compare_digest as compare_digest
    from typing import Any
else:
    import _signal as signal
    import _socket as socket
    from _collections import deque
    from _heapq import heapify, heappop, heappush
    from _operator import _compare_digest as compare_digest

__all__ = (
    "accept",
    "compare_digest",
    "deque",
    "dump_json",
    "heapify",
    "heappop",
    "heappush",
    "load_json",
    "signal",
    "socket",
)


class _Settings:
    """What the scanner asks of its context: JSON as the `json` module reads it by default."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def _refuse(value: object) -> None:
    raise TypeError(f"{type(value).__name__} has no form in JSON")


_scan = _json.make_scanner(_Settings)  # type: ignore[arg-type]
_encode = _json.make_encoder(None, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, True)


def load_json(data: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or not UTF-8. RecursionError: it is nested too deeply.
    """
    text = data.decode().strip(" \t\n\r")
    try:
        value, end = _scan(text, 0)
        if end == len(text):
            return value
    except (StopIteration, SystemError, ValueError):  # SystemError: it did not find json's own error class
        pass
    import json  # knows how to say what is wrong, and is needed for nothing else

    return json.loads(text)


def dump_json(value: Any) -> bytes:
    """Compact JSON as ASCII bytes."""
    return "".join(_encode(value, 0)).encode("ascii")


def accept(listener: socket.socket) -> tuple[int, str]:
    """Accepts a connection: its descriptor, non-blocking, and the peer's address.

    Raises:
        OSError: as socket.accept.
    """
    fd, address = listener._accept()  # type: ignore[attr-defined]
    set_blocking(fd, False)
    return fd, str(address[0])
