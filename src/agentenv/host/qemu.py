"""Which QEMU is here, and whether it will do."""

from __future__ import annotations

import subprocess

from agentenv.host.capability import Capability
from agentenv.vmm.qemu.version import OLDEST, WHY_NOT, Version, parse


def version(program: str) -> Version | None:
    """The version that a QEMU program says it is; None when it is absent or no QEMU."""
    try:
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    return parse(shown)


def judge(program: str, found: Version | None, *, kvm: bool, distribution: str = "") -> Capability:
    """Whether a version will do."""
    why = "it runs the machines"
    if found is None:
        remedy = f"apt install {_package(distribution)}"
        return Capability("qemu", "missing", True, f"no {program} here", why, remedy)
    text = ".".join(map(str, found))
    if found >= OLDEST:
        return Capability("qemu", "ok", True, text, why, "")
    least = ".".join(map(str, OLDEST[:2]))
    remedy = f"apt install {_package(distribution)}  (version {least} or newer)"
    detail = f"{text} is too old: {WHY_NOT['kvm' if kvm else 'tcg']}"
    return Capability("qemu", "missing", True, detail, why, remedy)


def _package(distribution: str) -> str:
    """What to ask apt for: Debian 12's own is too old."""
    return "-t bookworm-backports qemu-system-x86" if distribution == "bookworm" else "qemu-system-x86"
