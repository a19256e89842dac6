"""Which QEMU there is, and whether it will do."""

from __future__ import annotations

import asyncio
import re
import shutil

from agentenv.errors import HostIncapable
from agentenv.vmm.qemu.command import Accelerator

Version = tuple[int, int, int]

OLDEST: Version = (8, 2, 0)
WHY_NOT: dict[Accelerator, str] = {
    "tcg": "older ones emulate an atomic instruction (cmpxchg16b) wrongly, and guests crash at random",
    "kvm": "older ones cannot take over an open /dev/kvm, nor map a snapshot's memory read-only",
}
_LIMIT_S = 20.0


def locate(program: str) -> str:
    """The path of the QEMU program.

    Raises:
        HostIncapable: there is none.
    """
    path = shutil.which(program)
    if path is None:
        raise HostIncapable(
            f"there is no QEMU: {program} is not an executable on the path",
            remedy="install qemu-system-x86 (on Debian 12 from bookworm-backports), or set AENV_QEMU",
        )
    return path


async def ask(path: str) -> Version:
    """The version that a QEMU program says it has.

    Raises:
        HostIncapable: it does not run, or is not QEMU.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            path, "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        async with asyncio.timeout(_LIMIT_S):
            output, _ = await process.communicate()
    except (OSError, TimeoutError) as error:
        raise HostIncapable(f"{path} does not run: {error}", remedy="reinstall qemu-system-x86") from error
    found = parse(output.decode(errors="replace"))
    if found is None:
        raise HostIncapable(f"{path} does not say that it is QEMU", remedy="set AENV_QEMU to QEMU's program")
    return found


def parse(output: str) -> Version | None:
    """The version in the output of `qemu-system-x86_64 --version`."""
    match = re.search(r"QEMU emulator version (\d+)\.(\d+)(?:\.(\d+))?", output)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def require(version: Version, accelerator: Accelerator) -> None:
    """Refuse a QEMU that is too old for the accelerator.

    Raises:
        HostIncapable: with the reason.
    """
    if version >= OLDEST:
        return
    have, need = ".".join(map(str, version)), ".".join(map(str, OLDEST[:2]))
    raise HostIncapable(
        f"QEMU {have} is too old: {need} or newer is needed, since {WHY_NOT[accelerator]}",
        remedy="install a newer qemu-system-x86 (on Debian 12 from bookworm-backports)",
    )
