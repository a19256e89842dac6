"""Whether KVM is really usable here, found by booting the guest's kernel with it.

That /dev/kvm opens, and even creates a machine, is no proof: there are hosts where only kernels made
for them run. So the kernel is booted as far as its initramfs, and the verdict is remembered for as
long as host kernel, boot, QEMU and guest kernel stay what they were.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import select
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from agentenv.config import Settings
from agentenv.errors import HostIncapable
from agentenv.guestimage import build as guest
from agentenv.guestimage.initramfs import MARKER
from agentenv.host import qemu
from agentenv.vmm.machine import GuestFiles

DEVICE = Path("/dev/kvm")
LIMIT_S = 10.0  # a boot that far takes half a second with KVM
_TAIL = 4096


@dataclass(frozen=True)
class Verdict:
    """Whether KVM works, and the reason in words."""

    usable: bool
    reason: str


def verdict(settings: Settings, *, limit_s: float = LIMIT_S) -> Verdict:
    """Whether machines of this node can run with KVM.

    Takes up to `limit_s` seconds the first time, nothing afterwards.

    Raises:
        HostIncapable: there are no guest files yet to boot.
    """
    refused = cannot_open(DEVICE)
    if refused is not None:
        return Verdict(False, refused)
    files = guest.load(settings)
    key = _key(settings, files)
    known = _remembered(_record(settings), key)
    if known is None:
        known = probe(settings.qemu, files, limit_s=limit_s)
        _remember(_record(settings), key, known)
    return known


def cannot_open(device: Path) -> str | None:
    """Why a device cannot be used at all; None when it opens."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return f"there is no {device}"
    except OSError as error:
        return f"{device} does not open: {error.strerror}"
    return None


def probe(program: str, files: GuestFiles, *, limit_s: float = LIMIT_S) -> Verdict:
    """Boot the guest's kernel with KVM until its init speaks, or stops, or the time is over."""
    begun = time.monotonic()
    try:
        process = subprocess.Popen(
            probe_command(program, files),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        return Verdict(False, f"{program} does not start: {error.strerror}")
    try:
        assert process.stdout is not None
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))  # one that aborts leaves no dump
        shown, over = _read_until(process.stdout.fileno(), MARKER.encode(), begun + limit_s)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    return judge(shown.decode(errors="replace"), over, time.monotonic() - begun)


def judge(shown: str, over: bool, seconds: float) -> Verdict:
    """The verdict on a boot: what it and QEMU wrote, whether time ran out, how long it took."""
    if MARKER in shown:
        return Verdict(True, f"the guest kernel boots with it in {seconds:.1f} s")
    if over:
        return Verdict(False, f"the guest kernel does not boot with it: no sign of life in {seconds:.0f} s")
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    last = lines[-1][-160:] if lines else "nothing"
    return Verdict(False, f"the guest kernel does not boot with it: QEMU says {last!r}")


def probe_command(program: str, files: GuestFiles) -> list[str]:
    """A machine without disks: its init says that it misses them, and that is the sign of life."""
    return [
        *(program, "-machine", "microvm", "-accel", "kvm", "-cpu", "host", "-m", "128M", "-smp", "1"),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"),
        *("-kernel", str(files.kernel), "-initrd", str(files.initramfs)),
        *("-append", "console=ttyS0 quiet panic=-1 reboot=t mitigations=off"),
    ]


def _read_until(descriptor: int, marker: bytes, deadline: float) -> tuple[bytes, bool]:
    """What was read until the marker or the end, and whether the time ran out before either."""
    shown = b""
    while marker not in shown:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return shown, True
        data = os.read(descriptor, 65536)
        if not data:
            break
        shown = (shown + data)[-_TAIL:]
    return shown, False


def _record(settings: Settings) -> Path:
    return settings.home / "kvm.json"


def _key(settings: Settings, files: GuestFiles) -> dict[str, object]:
    version = qemu.version(settings.qemu)
    return {
        "host_kernel": platform.release(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "qemu": f"{settings.qemu} {'.'.join(map(str, version or ()))}",
        "guest": [files.kernel.parent.name, files.kernel.name, files.initramfs.name],
    }


def _remembered(record: Path, key: dict[str, object]) -> Verdict | None:
    try:
        content = json.loads(record.read_text())
        return Verdict(**content["verdict"]) if content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never probed, or by another version of this program


def _remember(record: Path, key: dict[str, object], known: Verdict) -> None:
    temporary = record.with_name(f".{record.name}.new")
    try:
        temporary.write_text(json.dumps({"key": key, "verdict": asdict(known)}, indent=2) + "\n")
        temporary.replace(record)
    except OSError:
        pass  # a reader without the right to write probes again next time


def require(settings: Settings) -> None:
    """Pass where KVM works.

    Raises:
        HostIncapable: it does not; the message has the reason.
    """
    known = verdict(settings)
    if not known.usable:
        raise HostIncapable(f"KVM was asked for, but {known.reason}", remedy="set AENV_ACCELERATOR to auto")
