"""Which drives a new sandbox may have beside its root disk. Decided from what is asked; nothing is done."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from agentenv.errors import InvalidRequest
from agentenv.snapshot.records import Attached
from agentenv.vmm.machine import DRIVES_MOST

ABOVE = "/mnt"  # where drives are that say no place
ID_MAX = 64
# What the system or the agent has under these is not to be hidden.
RESERVED = ("/.agentenv", "/agentenv", "/opt/agentenv", "/proc", "/sys", "/dev", "/run")
# Nor these themselves; there may be drives below them.
TAKEN = ("/", "/bin", "/boot", "/etc", "/lib", "/lib64", "/mnt", "/root", "/sbin", "/tmp", "/usr", "/var")


@dataclass(frozen=True)
class NewDrive:
    """An image that is wanted beside the root disk, at `path`; with `part` only that directory of it is seen.
    `disk_mib` is the size of a writable one; None for that of its image."""

    id: str
    image: str
    path: str
    read_only: bool = True
    part: str | None = None
    disk_mib: int | None = None


def new_drive(
    drive_id: str,
    image: str,
    *,
    path: str | None = None,
    read_only: bool = True,
    part: str | None = None,
    disk_mib: int | None = None,
) -> NewDrive:
    """A drive as it is asked for, with its place said.

    Raises:
        InvalidRequest: it can be nowhere, or not that; the message names it.
    """
    if not drive_id or len(drive_id) > ID_MAX or "/" in drive_id or not drive_id.isprintable():
        raise InvalidRequest(f"drive {drive_id!r}: an id has 1 to {ID_MAX} characters and no `/`")
    if drive_id in (".", ".."):
        raise InvalidRequest(f"drive {drive_id!r}: this cannot be an id")
    if not image:
        raise InvalidRequest(f"drive {drive_id!r}: it has no image")
    if read_only and disk_mib is not None:
        raise InvalidRequest(
            f"drive {drive_id!r}: one that is read-only has the size of its image",
            remedy="leave diskSizeMB away, or give readOnly: false",
        )
    place = _place(drive_id, path if path is not None else f"{ABOVE}/{drive_id}")
    return NewDrive(drive_id, image, place, read_only, _part(drive_id, part), disk_mib)


def require_room(wanted: Sequence[NewDrive], present: Sequence[Attached] = ()) -> None:
    """Refuse drives that cannot be together, or not beside those that there are already.

    Raises:
        InvalidRequest: says which.
    """
    if len(wanted) + len(present) > DRIVES_MOST:
        there = f", and {len(present)} are there already" if present else ""
        raise InvalidRequest(f"a sandbox can have {DRIVES_MOST} drives; {len(wanted)} are wanted{there}")
    ids, paths = {each.id for each in present}, {each.path: each.id for each in present}
    for drive in wanted:
        if drive.id in ids:
            raise InvalidRequest(f"drive {drive.id!r}: there are two of this id")
        if drive.path in paths:
            raise InvalidRequest(f"drive {drive.id!r}: {paths[drive.path]!r} is at {drive.path} already")
        ids.add(drive.id)
        paths[drive.path] = drive.id


def _place(drive_id: str, path: str) -> str:
    if not path.startswith("/") or path.startswith("//"):
        raise InvalidRequest(f"drive {drive_id!r}: mountPath {path!r} is not absolute")
    _require_plain(drive_id, "mountPath", path)
    place = posixpath.normpath(path)
    if place in TAKEN or any(f"{place}/".startswith(f"{name}/") for name in RESERVED):
        raise InvalidRequest(
            f"drive {drive_id!r}: {place} is the system's", remedy=f"mount it at {ABOVE}/{drive_id}"
        )
    return place


def _part(drive_id: str, part: str | None) -> str | None:
    if part is None:
        return None
    if not part or part.startswith("/"):
        raise InvalidRequest(f"drive {drive_id!r}: subPath {part!r} is no path below the image's root")
    _require_plain(drive_id, "subPath", part)
    found = posixpath.normpath(part)
    return None if found == "." else found


def _require_plain(drive_id: str, what: str, path: str) -> None:
    if ".." in path.split("/"):
        raise InvalidRequest(f"drive {drive_id!r}: {what} {path!r} goes up with `..`")
    if not path.isprintable() or len(path.encode()) > 1024:
        raise InvalidRequest(f"drive {drive_id!r}: {what} {path[:80]!r} has other than printable characters")
