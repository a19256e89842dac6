"""`doctor`: every capability of this host that a node needs or profits from."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from agentenv.config import Settings
from agentenv.errors import AenvError, HostIncapable
from agentenv.guestimage import build as guest
from agentenv.host import checks, kvm, qemu, service, serving, starting, tsc
from agentenv.host.capability import Capability, able, as_json, as_table
from agentenv.vmm.cgroup import Cgroups

__all__ = ["Capability", "able", "as_json", "as_table", "run"]


def run(settings: Settings) -> list[Capability]:
    """Look at everything. Takes a second, and some more where KVM was never tried yet.

    Nothing on the host is changed, but for the verdict on KVM, which is remembered.
    """
    verdict = kvm_verdict(settings)
    with_kvm = settings.accelerator == "kvm" or (settings.accelerator == "auto" and verdict.usable)
    version = qemu.version(settings.qemu)
    return [
        processor(),
        *starting.checks(settings.qemu),
        checks.root(),
        checks.home(settings),
        guest_files(settings),
        qemu.judge(settings.qemu, version, kvm=with_kvm, distribution=distribution()),
        accelerated(settings, verdict),
        clock(with_kvm=with_kvm),
        *checks.programs(),
        checks.tun(),
        checks.namespaces(),
        checks.veth(),
        checks.nftables(),
        checks.forwarding(),
        checks.cgroups(Cgroups.of_host(machines_group(settings))),
        checks.fuse(),
        checks.reflink(settings),
        checks.xattrs(settings),
        checks.disk(settings),
        checks.memory(settings, Path("/proc/meminfo").read_text()),
        serving.port(settings),
        serving.keys(settings),
        serving.clock(),
        serving.service_of(settings),
    ]


def processor() -> Capability:
    """The architecture that guests are made for."""
    here = f"{platform.system()} on {platform.machine()}"
    why = "guests are x86-64 machines on a Linux host"
    if here == "Linux on x86_64":
        return Capability("platform", "ok", True, f"{here}, {os.cpu_count()} cpus", why, "")
    return Capability("platform", "missing", True, here, why, "use a Linux host on x86-64")


def guest_files(settings: Settings) -> Capability:
    """Kernel, initramfs and tools drive."""
    why = "it is what every machine boots with"
    try:
        outdated = guest.stale(settings)
    except AenvError as error:
        return Capability("guest files", "missing", True, error.message, why, "aenv setup")
    if outdated:
        detail = f"no longer fits this program or its settings: {', '.join(outdated)}"
        return Capability("guest files", "degraded", True, detail, why, "aenv setup")
    return Capability("guest files", "ok", True, f"in {settings.guest_dir}", why, "")


def machines_group(settings: Settings) -> str | None:
    """The delegated control group: the service has it in its unit, which whoever runs doctor is not in."""
    return settings.cgroup or (service.GROUP if service.of(settings) is not None else None)


def kvm_verdict(settings: Settings) -> kvm.Verdict:
    """The verdict on KVM; without guest files nothing can be booted to find out."""
    try:
        return kvm.verdict(settings)
    except HostIncapable:
        return kvm.Verdict(False, f"{kvm.DEVICE} opens; whether guests boot with it shows after aenv setup")


def accelerated(settings: Settings, verdict: kvm.Verdict) -> Capability:
    """Hardware virtualisation, and what is done about it."""
    why = "with it guests run at nearly the host's speed, in software 3 to 12 times slower"
    if verdict.usable:
        unused = "; not used: AENV_ACCELERATOR=tcg" if settings.accelerator == "tcg" else ""
        return Capability("kvm", "ok", False, verdict.reason + unused, why, "")
    if settings.accelerator == "kvm":
        return Capability("kvm", "missing", True, verdict.reason, why, "set AENV_ACCELERATOR to auto")
    detail = f"{verdict.reason}; machines run in software"
    remedy = (
        "use a host with hardware virtualisation (nested, on a virtual one), with write access to /dev/kvm"
    )
    return Capability("kvm", "degraded", False, detail, why, remedy)


def clock(*, with_kvm: bool) -> Capability:
    """The TSC's rate, without which guests may hang as they boot in software."""
    why = "guests in software are told the rate of their clock, since measuring it fails on a busy host"
    try:
        rate = tsc.khz()
    except AenvError as error:
        return Capability("tsc", "missing", not with_kvm, error.message, why, "use another host, or KVM")
    return Capability("tsc", "ok", not with_kvm, f"{rate / 1000:.3f} MHz", why, "")


def distribution() -> str:
    """The code name of the host's distribution, as /etc/os-release has it; empty without one."""
    try:
        return platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    except OSError:
        return ""
