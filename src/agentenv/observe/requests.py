"""The id of the request under way: known to all that is done for it, operations that outlive it included."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
_FORM = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id(given: str | None) -> str:
    """The id that a client gave, if it can be one, else a new one."""
    return given if given and _FORM.fullmatch(given) else secrets.token_hex(8)
