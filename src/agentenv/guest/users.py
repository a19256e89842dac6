"""Users and groups from the image's own /etc/passwd and /etc/group, read by us.

Not by the C library: its name service loads plugins of the image's libc, and an image may have another
libc or none. Without a passwd file there is root and nobody else. Both files are read again when they
changed (images add users while they run).
"""

from __future__ import annotations

import os

PASSWD = "/etc/passwd"
GROUP = "/etc/group"
_NOBODYS = 0xFFFF_FFFF  # what stands for "no user" in system calls


class User:
    """An account: `groups` are its supplementary group ids, its own included."""

    __slots__ = ("gid", "groups", "home", "name", "shell", "uid")

    def __init__(
        self, name: str, uid: int, gid: int, home: str, shell: str, groups: tuple[int, ...] = ()
    ) -> None:
        self.name = name
        self.uid = uid
        self.gid = gid
        self.home = home or "/"
        self.shell = shell or "/bin/sh"
        self.groups = groups


class _File:
    """The fields of a colon-separated file, kept until it changes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._rows: list[list[str]] = []

    def rows(self) -> list[list[str]]:
        """Its rows; the same list as before, when it did not change."""
        try:
            status = os.stat(self.path)
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                with open(self.path, encoding="utf-8", errors="surrogateescape") as file:
                    self._rows = [line.rstrip("\n").split(":") for line in file if line[:1] not in "#+-\n"]
                self._stamp = stamp
        except OSError:
            if self._stamp is not None:
                self._rows, self._stamp = [], None
        return self._rows


_files: dict[str, _File] = {}
_found: dict[str, User] = {}
_found_in: tuple[list[list[str]], list[list[str]]] = ([], [])


def find(name: str) -> User:
    """The account of that name, or of that number when no name is like it. A number that the image does not
    know is an account as well, as in Docker: of the group 0, at home in /.

    Raises:
        KeyError: there is none.
    """
    global _found_in
    accounts, groups = _rows(PASSWD), _rows(GROUP)
    if accounts is not _found_in[0] or groups is not _found_in[1]:
        _found_in = (accounts, groups)
        _found.clear()
    user = _found.get(name)
    if user is None:
        user = _found[name] = _find(name)
    return user


def _find(name: str) -> User:
    row = _row(name)
    if row is not None:
        uid, gid = int(row[2]), int(row[3])
        return User(row[0], uid, gid, row[5], row[6] if len(row) > 6 else "", _groups_of(row[0], gid))
    if name in ("root", "0"):
        return User("root", 0, 0, "/root", "/bin/sh", (0,))
    if name.isascii() and name.isdigit() and int(name) < _NOBODYS:
        return User(name, int(name), 0, "/", "/bin/sh", (0,))
    raise KeyError(name)


def by_uid(uid: int) -> str:
    """The name of a user id; the number as text when it has none."""
    return _name_of(PASSWD, 4, uid) or ("root" if uid == 0 else str(uid))


def by_gid(gid: int) -> str:
    """The name of a group id; the number as text when it has none."""
    return _name_of(GROUP, 3, gid) or ("root" if gid == 0 else str(gid))


def gid_of(name: str) -> int | None:
    """The id of a group, or None."""
    for row in _rows(GROUP):
        if row[0] == name and len(row) > 2 and row[2].isdigit():
            return int(row[2])
    return None


def _rows(path: str) -> list[list[str]]:
    file = _files.get(path)
    if file is None:
        file = _files[path] = _File(path)
    return file.rows()


def _row(name: str) -> list[str] | None:
    numbered = None
    for row in _rows(PASSWD):
        if len(row) >= 6 and row[2].isdigit() and row[3].isdigit():
            if row[0] == name:
                return row
            if numbered is None and row[2] == name:
                numbered = row
    return numbered


def _groups_of(name: str, gid: int) -> tuple[int, ...]:
    members = (
        int(row[2]) for row in _rows(GROUP) if len(row) > 3 and row[2].isdigit() and name in row[3].split(",")
    )
    return (gid, *(group for group in members if group != gid))


def _name_of(path: str, least: int, number: int) -> str | None:
    text = str(number)
    for row in _rows(path):
        if len(row) >= least and row[2] == text:
            return row[0]
    return None
