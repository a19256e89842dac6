"""Calls of the C library that Python has no binding for. ctypes is imported with the first of them."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_library: Any = None


def library() -> Any:
    """The C library."""
    global _library
    if _library is None:
        import ctypes

        _library = ctypes.CDLL(None, use_errno=True)
    return _library


def checked(result: int, what: str, explain: Callable[[int], str] = os.strerror) -> int:
    """What a call returned.

    Raises:
        OSError: it is less than 0; `what` is what it was about.
    """
    if result < 0:
        import ctypes

        number = ctypes.get_errno()
        raise OSError(number, explain(number), what)
    return result
