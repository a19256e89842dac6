"""What an error of the system or a last word of QEMU's means for the one who wanted a machine."""

from __future__ import annotations

import errno

from agentenv.errors import AenvError, CapacityExceeded, HostFault, HostIncapable, StoreFull

_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}


def of_system(error: OSError, doing: str) -> AenvError:
    """The typed error for an OSError met while `doing` something."""
    place = f" ({error.filename})" if error.filename else ""
    said = f"{doing}: {error.strerror or error}{place}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(said, remedy="free space on the data directory's filesystem")
    if error.errno in _ROOM:
        return CapacityExceeded(said, remedy="end sandboxes, or raise the limits of the node's process")
    if error.errno in (errno.EPERM, errno.EACCES):
        return HostIncapable(said, remedy="run the node as root, with CAP_SYS_ADMIN and CAP_NET_ADMIN")
    return HostFault(said)


def of_early_end(status: int | None, last_words: str) -> AenvError:
    """The typed error for a QEMU that ended before it answered."""
    how = (
        "ended"
        if status is None
        else f"was killed by signal {-status}"
        if status < 0
        else f"ended with {status}"
    )
    said = f"QEMU {how} at its start: {last_words or 'it said nothing'}"
    words = last_words.lower()
    if "no space left" in words:
        return StoreFull(said, remedy="free space on the data directory's filesystem")
    if "cannot allocate memory" in words or status == -9:
        return CapacityExceeded(said, remedy="end sandboxes, or give the machine less memory")
    if "kvm" in words:
        return HostIncapable(said, remedy="set AENV_ACCELERATOR=tcg; `aenv doctor` tells what KVM lacks")
    if "setpriv:" in words:
        return HostIncapable(said, remedy="install a newer util-linux; check that AENV_QEMU can be run")
    return HostFault(said, remedy="the message above is QEMU's own; `aenv doctor` checks the host")
