"""Runs in the guest: has login shells keep a PATH.

    profile.py PATH

Clients run every command in a login shell, and the start-up file of most distributions sets PATH anew: what
an image or a definition chose would not hold. Where there is no such file, nothing is to be done.
"""

from __future__ import annotations

import os
import sys

_FILE = "/etc/profile.d/zz-agentenv-path.sh"  # the last one of its directory


def main(path: str) -> None:
    """Does it."""
    if not os.path.exists("/etc/profile"):
        return
    os.makedirs(os.path.dirname(_FILE), exist_ok=True)
    quoted = path.replace("'", "'\"'\"'")
    with open(_FILE, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"export PATH='{quoted}'\n")
    os.chmod(_FILE, 0o644)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OSError as error:
        raise SystemExit(f"{error.filename or _FILE}: {error.strerror}") from None
