"""Runs in the guest: makes a directory, and what is missing above it, the given user's.

workdir.py PATH USER
"""

from __future__ import annotations

import os
import sys


def owner_of(name: str) -> tuple[int, int]:
    """The ids of a user."""
    with open("/etc/passwd", encoding="utf-8", errors="surrogateescape") as file:
        for row in (line.split(":") for line in file):
            if len(row) > 3 and name in (row[0], row[2]):
                return int(row[2]), int(row[3])
    return (int(name), 0) if name.isdigit() else (0, 0)


def main(path: str, user: str) -> None:
    """Does it."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    if missing:
        uid, gid = (0, 0) if user in ("root", "0") else owner_of(user)
        for each in reversed(missing):
            os.mkdir(each, 0o755)
            os.chown(each, uid, gid)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3])
    except OSError as error:
        raise SystemExit(f"{error.filename or sys.argv[1]}: {error.strerror}") from None
