"""Which QEMU is here, and whether it will do."""

from __future__ import annotations

import re
import subprocess

from agentenv.host.capability import Capability

Version = tuple[int, int, int]

# Older ones corrupt flags in an unlocked cmpxchg16b under software emulation, and guests die at
# random ("double fault"); they also cannot map a memory file read-only and private at once.
LEAST: Version = (8, 2, 0)
_VERSION = re.compile(r"QEMU emulator version (\d+)\.(\d+)(?:\.(\d+))?")


def version(program: str) -> Version | None:
    """The version that a QEMU program says it is; None when it is absent or no QEMU."""
    try:
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    return parse(shown)


def parse(shown: str) -> Version | None:
    """The version from what `--version` prints."""
    found = _VERSION.search(shown)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def judge(program: str, found: Version | None, *, kvm: bool, distribution: str = "") -> Capability:
    """Whether a version will do. With KVM an older one runs machines but takes no snapshots."""
    why = "it runs the machines"
    if found is None:
        remedy = f"apt install {_package(distribution)}"
        return Capability("qemu", "missing", True, f"no {program} here", why, remedy)
    text = ".".join(map(str, found))
    if found >= LEAST:
        return Capability("qemu", "ok", True, text, why, "")
    least = ".".join(map(str, LEAST[:2]))
    remedy = f"apt install {_package(distribution)}  (version {least} or newer)"
    if kvm:
        detail = f"{text}: machines run with KVM, but snapshots need {least}"
        return Capability("qemu", "degraded", True, detail, why, remedy)
    detail = (
        f"{text}: below {least} guests crash at random without KVM (a bug in its emulation of cmpxchg16b)"
    )
    return Capability("qemu", "missing", True, detail, why, remedy)


def _package(distribution: str) -> str:
    """What to ask apt for: Debian 12's own is too old."""
    return "-t bookworm-backports qemu-system-x86" if distribution == "bookworm" else "qemu-system-x86"
