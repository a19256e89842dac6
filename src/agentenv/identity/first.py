"""The API key: the one in the settings, else one generated at first start and kept in a file."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from agentenv.config import Settings
from agentenv.errors import HostFault, StoreCorrupt

KEY_BYTES = 20


def load_or_create(settings: Settings) -> str:
    """The key in force. A new one has the form `e2b_` and hexadecimal digits, which older E2B clients
    insist on; its file has mode 0600 and belongs to the owner of the data directory.

    Raises:
        HostFault: the file cannot be read or made. StoreCorrupt: it is empty.
    """
    if settings.api_key:
        return settings.api_key
    path = settings.api_key_file
    try:
        if not path.exists():
            _create(path)
        key = path.read_text().strip()
    except OSError as error:
        raise HostFault(f"the API key file {path}: {error.strerror}") from error
    if not key:
        raise StoreCorrupt(f"the API key file {path} is empty", remedy="remove it; the next start makes one")
    return key


def _create(path: Path) -> None:
    """Write a new key and put it in place in one step, never over one that is there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        owner = path.parent.stat()
        if os.geteuid() == 0:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        os.write(descriptor, f"e2b_{secrets.token_hex(KEY_BYTES)}\n".encode())
        os.fsync(descriptor)
        try:
            path.hardlink_to(temporary)
        except FileExistsError:  # another start was quicker: its key is the key
            pass
    finally:
        os.close(descriptor)
        temporary.unlink()
