"""The static busybox that guests get: the host's, or the distribution's package unpacked."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

from agentenv.errors import HostFault
from agentenv.guestimage import apt

PACKAGE = "busybox-static"
_PT_INTERP = 3


def installed() -> Path | None:
    """The host's busybox, if it has one that needs no library."""
    found = shutil.which("busybox")
    return Path(found) if found and is_static(Path(found)) else None


def copy_to(target: Path) -> str:
    """Put a static busybox at `target`; the answer says where it came from.

    Raises:
        HostFault, HostIncapable: the host has none and apt could not bring one.
    """
    here = installed()
    if here is not None:
        shutil.copyfile(here, target)
        return str(here)
    package = apt.newest(PACKAGE)
    with apt.unpacked([package]) as tree:
        found = [path for path in (tree / "bin/busybox", tree / "usr/bin/busybox") if path.is_file()]
        if not found or not is_static(found[0]):
            raise HostFault(f"package {PACKAGE} {package.version} has no static busybox")
        shutil.copyfile(found[0], target)
    return f"{PACKAGE} {package.version}"


def is_static(program: Path) -> bool:
    """Whether a 64-bit ELF program asks for no loader (no PT_INTERP among its program headers)."""
    head = program.read_bytes()
    if head[:5] != b"\x7fELF\x02":
        return False
    (table,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    kinds = (struct.unpack_from("<I", head, table + index * size)[0] for index in range(count))
    return _PT_INTERP not in kinds
