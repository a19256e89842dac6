"""Signed file URLs: who may read or write one path without holding the access token.

The format is E2B's `v1`: the base64 (without padding) of the SHA-256 over
`path:operation:user:token[:expiration]`, where the path is the one given in the URL, unresolved,
and the user is empty when the URL names none.
"""

from __future__ import annotations

import time
from _operator import _compare_digest
from binascii import b2a_base64

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Operation = Literal["read", "write"]

UNAUTHORIZED_EXPIRED = "signature is already expired"


def sign(path: str, operation: Operation, user: str, token: str, expiration: int | None = None) -> str:
    """The signature of one file operation.

    Args:
        path: the path exactly as it stands in the URL's query.
        operation: what may be done.
        user: the user named in the query, or "" for the default user.
        token: the sandbox's access token.
        expiration: Unix time in seconds after which the signature is worthless; None for never.
    """
    from hashlib import sha256  # only signed URLs need it

    fields = [path, operation, user, token]
    if expiration is not None:
        fields.append(str(expiration))
    digest = sha256(":".join(fields).encode("utf-8", "surrogateescape")).digest()
    return "v1_" + b2a_base64(digest, newline=False).rstrip(b"=").decode("ascii")


def refusal(
    *,
    token: str | None,
    header: str | None,
    path: str,
    operation: Operation,
    user: str | None,
    signature: str | None,
    expiration: str | None,
    now: float | None = None,
) -> str | None:
    """Why a file request must be refused with 401, or None when it may go on.

    Args:
        token: the sandbox's access token; None when the sandbox has none and everything is open.
        header: the request's `X-Access-Token`, which decides alone when present.
        path: the query's `path`, unresolved.
        operation: what is to be done.
        user: the query's `username`.
        signature: the query's `signature`.
        expiration: the query's `signature_expiration`, as text.
        now: Unix time in seconds; the clock's when None.
    """
    if not token:
        return None
    if header:
        if _same(header, token):
            return None
        return "access token present in header but does not match"
    if signature is None:
        return "missing signature query parameter"
    until: int | None = None
    if expiration is not None:
        try:
            until = int(expiration)
        except ValueError:
            return "invalid signature"
    if not _same(signature, sign(path, operation, user or "", token, until)):
        return "invalid signature"
    if until is not None and until < int(time.time() if now is None else now):
        return UNAUTHORIZED_EXPIRED
    return None


def _same(given: str, expected: str) -> bool:
    # In constant time, as hmac.compare_digest (this is it; hmac would import OpenSSL). In bytes,
    # since it refuses text that is not ASCII, and the given text is anybody's.
    return _compare_digest(
        given.encode("utf-8", "surrogateescape"), expected.encode("utf-8", "surrogateescape")
    )
