"""Runs in the guest: makes sure that there is a user, with a home, without any tool of the image's.

    account.py NAME [sudo]

A number or an existing name is left as it is. With `sudo` the user may do anything without a password, where
the image has sudo.
"""

from __future__ import annotations

import os
import sys

_FIRST = 1000
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


def rows(path: str) -> list[list[str]]:
    """The fields of a colon-separated file; none if there is no such file."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return [line.rstrip("\n").split(":") for line in file if line.strip()]
    except FileNotFoundError:
        return []


def free_id(taken: list[list[str]]) -> int:
    """The first number from 1000 on that nobody has."""
    used = {int(row[2]) for row in taken if len(row) > 2 and row[2].isdigit()}
    number = _FIRST
    while number in used:
        number += 1
    return number


def append(path: str, line: str, mode: int) -> None:
    """Add a line to a file, which is made where it is missing."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                line = f"\n{line}"
        file.seek(0, os.SEEK_END)
        file.write(line.encode() + b"\n")


def shell() -> str:
    """The shell that a new user gets."""
    return next((path for path in ("/bin/bash", "/bin/sh") if os.path.exists(path)), "/bin/sh")


def ensure(name: str) -> None:
    """Make the user, unless it is there."""
    known = rows("/etc/passwd")
    if name == "root" or name.isdigit() or any(row[0] == name for row in known):
        return
    if not name or name[0] in "-." or not _LETTERS.issuperset(name) or len(name) > 32:
        raise SystemExit(f"'{name}' cannot be a user's name")
    groups = rows("/etc/group")
    number = free_id([*known, *groups])
    group = next((int(row[2]) for row in groups if row[0] == name and len(row) > 2), None)
    os.makedirs("/etc", exist_ok=True)
    if not known:
        append("/etc/passwd", "root:x:0:0:root:/root:" + shell(), 0o644)
    if not groups:
        append("/etc/group", "root:x:0:", 0o644)
    if group is None:
        group = number
        append("/etc/group", f"{name}:x:{number}:", 0o644)
    home = f"/home/{name}"
    append("/etc/passwd", f"{name}:x:{number}:{group}::{home}:{shell()}", 0o644)
    if os.path.exists("/etc/shadow"):
        append("/etc/shadow", f"{name}:!:19000:0:99999:7:::", 0o640)
    if not os.path.isdir(home):
        os.makedirs("/home", exist_ok=True)
        os.mkdir(home, 0o755)
        copy_skeleton(home, number, group)
        os.chown(home, number, group)


def copy_skeleton(home: str, uid: int, gid: int) -> None:
    """Give a new home the files that the image has for that."""
    try:
        names = os.listdir("/etc/skel")
    except OSError:
        return
    for name in names:
        source, target = f"/etc/skel/{name}", f"{home}/{name}"
        if os.path.isfile(source) and not os.path.islink(source):
            with open(source, "rb") as file, open(target, "wb") as copy:
                copy.write(file.read())
            os.chown(target, uid, gid)


def allow_everything(name: str) -> None:
    """Let the user do anything without a password, where there is sudo."""
    if os.path.isdir("/etc/sudoers.d"):
        path = f"/etc/sudoers.d/90-{name}"
        if not os.path.exists(path):
            append(path, f"{name} ALL=(ALL:ALL) NOPASSWD: ALL", 0o440)


if __name__ == "__main__":
    try:
        ensure(sys.argv[1])
        if "sudo" in sys.argv[2:]:
            allow_everything(sys.argv[1])
    except OSError as error:
        raise SystemExit(f"{error.filename or 'the account'}: {error.strerror}") from None
