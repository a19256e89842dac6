"""A file's own metadata: short texts that a client attaches, kept as extended attributes.

Key `k` is the attribute `user.e2b.k`. The limits are E2B's, and come from Linux: an attribute's
name has at most 255 bytes, and ext4 keeps all of a file's attributes in one block of 4096.
"""

from __future__ import annotations

import errno
import os

PREFIX = "user.e2b."
LONGEST_KEY = 255 - len(PREFIX)
LARGEST = 4096

HEADER_PREFIX = "x-metadata-"

_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP)


def from_headers(headers: dict[str, str]) -> dict[str, str]:
    """The metadata that a request's `X-Metadata-<key>` headers carry; keys in lower case."""
    return {
        name[len(HEADER_PREFIX) :].lower(): value
        for name, value in headers.items()
        if name.lower().startswith(HEADER_PREFIX) and len(name) > len(HEADER_PREFIX)
    }


def refusal(metadata: dict[str, str]) -> str | None:
    """Why this metadata cannot be kept, or None."""
    total = 0
    for key, value in metadata.items():
        if not key:
            return "metadata key must not be empty"
        if len(key) > LONGEST_KEY:
            return f"metadata key '{key}' exceeds {LONGEST_KEY} bytes"
        for what, text in (("key", key), (f"value for key '{key}'", value)):
            if not (text.isascii() and (text.isprintable() or not text)):
                return f"metadata {what} contains characters that are not printable ASCII"
        total += len(PREFIX) + len(key) + len(value)
    if total > LARGEST:
        return f"total metadata size {total} exceeds {LARGEST} bytes"
    return None


def read_metadata(path: str | int) -> dict[str, str]:
    """The metadata of the file at `path` (or of an open descriptor); {} where there can be none.

    What is not UTF-8 is passed over: anyone in the sandbox can set attributes.
    """
    metadata: dict[str, str] = {}
    try:
        names = os.listxattr(path)
    except OSError:
        return metadata
    for name in names:
        if name.startswith(PREFIX):
            key = name[len(PREFIX) :]
            try:
                key.encode("utf-8")
                metadata[key] = os.getxattr(path, name).decode("utf-8")
            except (OSError, UnicodeError):
                continue
    return metadata


def write_metadata(fd: int, metadata: dict[str, str]) -> None:
    """Make `metadata` the whole metadata of the open file: other keys go.

    Does nothing on a filesystem without extended attributes.

    Raises:
        OSError: no room (ENOSPC, EDQUOT, E2BIG), or not allowed.
    """
    try:
        for name in os.listxattr(fd):
            if name.startswith(PREFIX) and name[len(PREFIX) :] not in metadata:
                os.removexattr(fd, name)
        for key, value in metadata.items():
            os.setxattr(fd, PREFIX + key, value.encode("ascii"))
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
