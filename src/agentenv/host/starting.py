"""What `doctor` looks at of starting machines: the kernel, and the programs and namespaces they start in.

Each thing is done as it is done for a machine, with a program that ends at once.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
from pathlib import Path

from agentenv.errors import AenvError
from agentenv.host.capability import Capability
from agentenv.host.checks import complaint
from agentenv.vmm import bounds
from agentenv.vmm.qemu.files import view_of

OLDEST_KERNEL = (5, 12)  # mount_setattr(2)
OLDEST_PYTHON = (3, 11)
GOOD_DESCRIPTORS = 16 * 1024
_NOBODY = 65534

# What the node does with each (capabilities(7)), besides what root in a container usually may.
CAPABILITIES = {
    0: "CAP_CHOWN",
    1: "CAP_DAC_OVERRIDE",
    5: "CAP_KILL",
    6: "CAP_SETGID",
    7: "CAP_SETUID",
    8: "CAP_SETPCAP",
    12: "CAP_NET_ADMIN",
    18: "CAP_SYS_CHROOT",
    19: "CAP_SYS_PTRACE",
    21: "CAP_SYS_ADMIN",
    27: "CAP_MKNOD",
}


def kernel(release: str) -> Capability:
    """The host's Linux, from the text of `uname -r`."""
    why = "machines' processes see a tree of files of their own, made with mount_setattr"
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is not None and (int(found[1]), int(found[2])) >= OLDEST_KERNEL:
        return Capability("kernel", "ok", True, f"Linux {release}", why, "")
    least = ".".join(map(str, OLDEST_KERNEL))
    detail = f"Linux {release} is too old: {least} is the least"
    return Capability("kernel", "missing", True, detail, why, f"boot Linux {least} or newer")


def python(version: tuple[int, int, int] = sys.version_info[:3]) -> Capability:
    """The Python that the node runs on."""
    why = "the node, and the agent in guests, which gets a copy of it"
    text = f"{'.'.join(map(str, version))}, {sys.executable}"
    if version >= OLDEST_PYTHON:
        return Capability("python", "ok", True, text, why, "")
    least = ".".join(map(str, OLDEST_PYTHON))
    return Capability("python", "missing", True, f"{text} is too old", why, f"Python {least} or newer")


def capabilities(effective: int) -> Capability:
    """What root may do here, from CapEff of /proc/self/status: in a container it may be little."""
    why = "it makes namespaces, network devices, owners of files and machines' processes"
    absent = [name for bit, name in CAPABILITIES.items() if not effective >> bit & 1]
    if not absent:
        return Capability("capabilities", "ok", True, "all that a node needs", why, "")
    remedy = "run as root on a host, or in a container that has them (--privileged, --cap-add)"
    return Capability("capabilities", "missing", True, f"without {', '.join(absent)}", why, remedy)


def effective(status: str) -> int:
    """The effective capabilities in a text of /proc/PID/status."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return int(found[1], 16) if found else 0


def descriptors(most: int) -> Capability:
    """How many files may be open at once, the limit that nobody but root can raise."""
    why = "each connection to a sandbox takes two, each machine some ten"
    if most >= GOOD_DESCRIPTORS:
        return Capability("open files", "ok", False, f"up to {most}", why, "")
    remedy = "ulimit -Hn 65536 for what starts the node (LimitNOFILE= in a unit)"
    return Capability("open files", "degraded", False, f"up to {most}", why, remedy)


def isolation(program: str) -> Capability:
    """The view of QEMU's own files that a machine's process gets, and QEMU as a program that has one."""
    why = "a machine's process sees nothing of the host but its own program"
    path = shutil.which(program)
    if path is None:
        detail = f"cannot be tried without {program}"
        return Capability("isolation", "missing", True, detail, why, "install QEMU, or set AENV_QEMU")
    try:
        view_of(path).close()
    except AenvError as error:
        return Capability("isolation", "missing", True, error.message, why, error.remedy or "")
    return Capability("isolation", "ok", True, "a view of QEMU's files alone was made", why, "")


def confinement() -> Capability:
    """The user, the limits and the namespaces that a machine's process has."""
    why = "each machine is a user of its own without any rights"
    try:
        words = bounds.confined(_NOBODY, bounds.Bounds(1 << 40, 64))
    except AenvError as error:
        return Capability("confinement", "missing", True, error.message, why, error.remedy or "")
    trouble = complaint(["unshare", "--mount", "--ipc", "--uts", "--pid", "--fork", *words, "true"])
    if trouble is None:
        return Capability("confinement", "ok", True, "a process was started so", why, "")
    remedy = "run as root, with CAP_SYS_ADMIN, CAP_SETUID and CAP_SETPCAP"
    return Capability("confinement", "missing", True, trouble, why, remedy)


def checks(program: str) -> list[Capability]:
    """All of these, on this host."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return [
        kernel(platform.release()),
        python(),
        *([capabilities(effective(Path("/proc/self/status").read_text()))] if os.geteuid() == 0 else []),
        descriptors(1 << 20 if most == resource.RLIM_INFINITY else most),
        isolation(program),
        confinement(),
    ]
