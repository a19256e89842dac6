"""When a request to a registry is made again, and after how long. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime

ATTEMPTS = 5  # of a request, or of going on with a download, without a byte of progress
LONGEST_WAIT_S = 120.0  # a registry that asks for more is not waited for
_FIRST_WAIT_S = 0.5
_STATUSES = (408, 429, 500, 502, 503, 504)


def is_passing(status: int) -> bool:
    """Whether an answer of this status may be another one later."""
    return status in _STATUSES


def asked_wait(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that `Retry-After` asks for, as a number or as a date (RFC 9110, 10.2.3); None if it does not.

    `now` is seconds since the epoch.
    """
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except ValueError:
        return None


def wait(attempt: int, asked: float | None, jitter: float) -> float | None:
    """Seconds to wait after the failure of an attempt, counted from 1; None: do not try again.

    `jitter` is a number between 0 and 1, another one each time, so that many do not come back at once.
    """
    if attempt >= ATTEMPTS:
        return None
    backoff = _FIRST_WAIT_S * 2.0 ** (attempt - 1) * (1 + jitter)
    if asked is None:
        return backoff
    return asked + jitter if asked <= LONGEST_WAIT_S else None
