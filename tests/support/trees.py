"""What a directory tree holds, as data that can be compared."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any


def described(root: Path, *, times: bool = True) -> dict[str, tuple[Any, ...]]:
    """Every entry below `root`: type and mode, owner, content, links, extended attributes, time (s)."""
    found: dict[str, tuple[Any, ...]] = {}
    inodes: dict[int, str] = {}
    for directory, names, files in os.walk(root):
        names.sort()  # the walk goes in this order
        for name in sorted([*names, *files]):
            path = os.path.join(directory, name)
            relative = os.path.relpath(path, root)
            found[relative] = _entry(path, relative, inodes, times)
    return found


def _entry(path: str, relative: str, inodes: dict[int, str], times: bool) -> tuple[Any, ...]:
    status = os.lstat(path)
    content: Any = None
    if stat.S_ISREG(status.st_mode):
        content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    elif stat.S_ISLNK(status.st_mode):
        content = os.readlink(path)
    elif stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
        content = status.st_rdev
    first = None if stat.S_ISDIR(status.st_mode) else inodes.setdefault(status.st_ino, relative)
    xattrs = {name: os.getxattr(path, name, follow_symlinks=False) for name in _listed(path)}
    time = int(status.st_mtime) if times else 0
    return oct(status.st_mode), status.st_uid, status.st_gid, content, first, xattrs, time


def _listed(path: str) -> list[str]:
    return sorted(os.listxattr(path, follow_symlinks=False))
