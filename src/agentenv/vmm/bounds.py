"""The user and the limits that a machine's process has for good, as words before its command."""

from __future__ import annotations

import resource
import shutil
from dataclasses import dataclass

from agentenv.errors import HostIncapable

FILES = 4096  # layers, sockets, and what the block layer opens again


@dataclass(frozen=True)
class Bounds:
    """Of one process: the longest file that it may write, in bytes, and how many tasks its user may have."""

    file_bytes: int
    tasks: int


def programs() -> tuple[str, str]:
    """The programs that set them.

    Raises:
        HostIncapable: one is missing.
    """
    return _located("prlimit"), _located("setpriv")


def confined(uid: int, bounds: Bounds) -> list[str]:
    """The words before a command that make it run as `uid`, without any capability, within its bounds.

    A limit of one byte for a dump of memory, not of none: only that keeps the kernel from handing one to a
    program as well (core(5)).
    """
    prlimit, setpriv = programs()
    limits = {
        "core": 1,
        "fsize": _allowed(resource.RLIMIT_FSIZE, bounds.file_bytes),
        "nofile": _allowed(resource.RLIMIT_NOFILE, FILES),
        "nproc": _allowed(resource.RLIMIT_NPROC, bounds.tasks),
        "msgqueue": 0,
    }
    return [
        prlimit,
        *(f"--{name}={value}" for name, value in limits.items()),
        "--",
        setpriv,
        f"--reuid={uid}",
        f"--regid={uid}",
        "--clear-groups",
        "--no-new-privs",
        "--inh-caps=-all",
        "--ambient-caps=-all",
        "--bounding-set=-all",
        "--",
    ]


def _located(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise HostIncapable(f"{program} is missing", remedy="install util-linux")
    return path


def _allowed(kind: int, wanted: int) -> int:
    """A limit can be lowered only, where the node may not raise its own."""
    _, most = resource.getrlimit(kind)
    return wanted if most == resource.RLIM_INFINITY else min(wanted, most)
