"""What of the host a QEMU needs to run: itself, what starts it, and its firmware."""

from __future__ import annotations

import subprocess
from pathlib import Path

from agentenv.errors import HostIncapable
from agentenv.vmm import bounds
from agentenv.vmm.view import View

_LIMIT_S = 20.0
_ELF = b"\x7fELF"


def view_of(program: str) -> View:
    """The view that machines of this QEMU have of the host. Blocks for some tens of milliseconds.

    Raises:
        HostIncapable: the program does not run, or there can be no such view here.
    """
    if not _is_binary(program):
        raise HostIncapable(
            f"{program} is no program of its own: what a script runs cannot be known, and shown to machines",
            remedy="set AENV_QEMU to QEMU's own program",
        )
    return View((program, *bounds.programs()), _firmware(program))


def _is_binary(program: str) -> bool:
    with Path(program).open("rb") as file:
        return file.read(len(_ELF)) == _ELF


def _firmware(program: str) -> list[str]:
    """The directories in which QEMU looks for firmware, by its own account."""
    try:
        said = subprocess.run(
            [program, "-L", "help"], capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise HostIncapable(f"{program} does not run: {error}", remedy="reinstall qemu-system-x86") from error
    return [line for line in said.stdout.splitlines() if line.startswith("/")]
