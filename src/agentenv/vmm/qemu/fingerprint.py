"""All that must be the same where a machine's capture is restored, and the refusal where it is not.

The microvm machine has no versions, and `-cpu max` changes with QEMU: a state is loaded by the QEMU that
wrote it, or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from agentenv.errors import HostIncapable
from agentenv.vmm.machine import Incompatible, MachineSpec
from agentenv.vmm.qemu import command
from agentenv.vmm.qemu.command import Accelerator, Emulation
from agentenv.vmm.qemu.version import Version

_CPUINFO = Path("/proc/cpuinfo")

# A rate that was measured differs a little from one time to the next; guests bear more than this.
_TSC_PPM = 250


def fingerprint_of(spec: MachineSpec, emulation: Emulation, version: Version) -> dict[str, str]:
    """The fingerprint of a machine on this host. Reads the guest's files once, then knows them.

    Raises:
        HostIncapable: a guest file is missing.
    """
    guest = spec.guest
    return {
        "hypervisor": "qemu",
        "version": ".".join(map(str, version)),
        "accelerator": emulation.accelerator,
        "cpu": cpu(emulation.accelerator, _CPUINFO.read_text()),
        "vcpus": str(spec.vcpus),
        "memory_mib": str(spec.memory_mib),
        "kernel": digest(guest.kernel),
        "initramfs": digest(guest.initramfs),
        "tools": digest(guest.tools),
        # The TSC's rate is compared by itself.
        "command_line": command.kernel_command_line(Emulation(emulation.accelerator, 0)),
        "devices": " ".join(command.devices(spec)),
        "tsc_khz": str(emulation.tsc_khz),
    }


def require_same(saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Refuse a restore where anything differs.

    Raises:
        Incompatible: names the first difference.
    """
    for name in [*here, *(name for name in saved if name not in here)]:
        then, now = saved.get(name), here.get(name)
        if then != now and not (name == "tsc_khz" and _same_rate(then, now)):
            raise Incompatible(
                f"the snapshot is of another {name}: {then or 'unknown'} there, {now or 'unknown'} here",
                remedy="restore it where it was made, or start cold from its disk",
            )


def cpu(accelerator: Accelerator, cpuinfo: str) -> str:
    """The guest's processor: QEMU's own, or with KVM that in the text of /proc/cpuinfo and what it can do."""
    model = command.cpu(accelerator)
    if accelerator == "tcg":
        return model
    fields = dict(line.split(":", 1) for line in cpuinfo.split("\n\n")[0].splitlines() if ":" in line)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    flags = " ".join(sorted(values.get("flags", "").split()))
    known = [values.get(name, "?") for name in ("vendor_id", "cpu family", "model", "stepping")]
    return f"{model} {'/'.join(known)} {hashlib.sha256(flags.encode()).hexdigest()[:16]}"


def digest(path: Path) -> str:
    """SHA-256 of a file that is replaced rather than changed.

    Raises:
        HostIncapable: it is missing.
    """
    try:
        status = path.stat()
        return _digest(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise HostIncapable(
            f"the guest's {path.name} is missing: {path}: {error.strerror}", remedy="run `aenv setup`"
        ) from error


@lru_cache(maxsize=64)
def _digest(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _same_rate(then: str | None, now: str | None) -> bool:
    if not (then and now and then.isdecimal() and now.isdecimal()):
        return False
    return abs(int(then) - int(now)) * 1_000_000 <= _TSC_PPM * int(now)
