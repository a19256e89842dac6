"""What `doctor` looks at that needs no machine: rights, devices, kernel features, storage, memory.

Each check tries the thing itself, in a way that leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from agentenv.config import Settings
from agentenv.errors import AenvError
from agentenv.host.capability import Capability, Status
from agentenv.network.host import forward_blockers
from agentenv.vmm.cgroup import Cgroups

_TUNGETFEATURES = 0x800454CF
_FICLONE = 0x40049409
_GIB = 1 << 30
_MIB = 1 << 20
_LEAST_DISK = 2 * _GIB
_GOOD_DISK = 8 * _GIB
_GOOD_MEMORY = 2 * _GIB

Check = Callable[[], Capability]

SYSTEM_PATH = ":/usr/sbin:/sbin"  # which a user's own path may lack

# Program → package, and what it is for.
PROGRAMS = {
    "mke2fs": ("e2fsprogs", "makes the filesystems of images and of the tools drive"),
    "debugfs": ("e2fsprogs", "fills images with owners and attributes kept"),
    "nft": ("nftables", "sets the rules of sandboxes' networks"),
    "tar": ("tar", "reads and writes image layers"),
    "unshare": ("util-linux", "builds templates where the host does not see it"),
}
OPTIONAL_PROGRAMS = {
    "mmdebstrap": ("mmdebstrap", "builds templates from debootstrap:SUITE, such as base"),
    "apt-get": ("apt", "fetches the guest's kernel, unless AENV_KERNEL names one"),
    "busybox": ("busybox-static", "starts guests; setup fetches its package where it is not installed"),
    "zstd": ("zstd", "reads kernel modules and image layers compressed with it (Ubuntu's are)"),
}


def root() -> Capability:
    """The rights to make namespaces, taps and users' processes."""
    why = "machines get namespaces, network devices and users of their own"
    if os.geteuid() == 0:
        return Capability("root", "ok", True, "running as root", why, "")
    return Capability("root", "missing", True, f"running as user {os.geteuid()}", why, "run it with sudo")


def home(settings: Settings) -> Capability:
    """A data directory that can be written to."""
    why = "images, machines' disks and records are kept there"
    place = _existing(settings.home)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        remedy = "run as root, or set AENV_HOME to a directory that can be written to"
        return Capability("data directory", "missing", True, f"{place}: {error.strerror}", why, remedy)
    detail = str(settings.home) + ("" if settings.home.is_dir() else " (aenv setup makes it)")
    return Capability("data directory", "ok", True, detail, why, "")


def programs() -> list[Capability]:
    """The programs that are run, each with its package."""
    found = []
    for required, table in ((True, PROGRAMS), (False, OPTIONAL_PROGRAMS)):
        for name, (package, why) in table.items():
            path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}{SYSTEM_PATH}")
            status: Status = "ok" if path else "missing"
            remedy = "" if path else f"apt install {package}"
            found.append(Capability(name, status, required, path or "not installed", why, remedy))
    return found


def tun() -> Capability:
    """Taps, which machines' network devices are."""
    why = "a machine's network device is a tap"
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return Capability("tun", "missing", True, f"/dev/net/tun: {error.strerror}", why, "modprobe tun")
    try:
        answer = fcntl.ioctl(descriptor, _TUNGETFEATURES, struct.pack("I", 0))
        (features,) = struct.unpack("I", answer)
    except OSError as error:
        return Capability("tun", "missing", True, f"/dev/net/tun: {error.strerror}", why, "modprobe tun")
    finally:
        os.close(descriptor)
    return Capability("tun", "ok", True, f"features {features:#x}", why, "")


# In a namespace of its own, which goes with the process and takes the pair along.
_VETH = """
import os
from agentenv.network import netlink
here = os.open("/proc/self/ns/net", os.O_RDONLY)
with netlink.Rtnetlink() as link:
    link.apply(netlink.add_veth("aenv0", "02:00:00:00:00:01", "aenv1", "02:00:00:00:00:02", here, 1500))
"""


def namespaces() -> Capability:
    """Network namespaces."""
    why = "each sandbox has a network of its own"
    trouble = complaint(["unshare", "--net", "true"])
    if trouble is not None:
        remedy = "run as root on a host, or in a container, that may make namespaces (CAP_SYS_ADMIN)"
        return Capability("network namespaces", "missing", True, trouble, why, remedy)
    return Capability("network namespaces", "ok", True, "one was made", why, "")


def veth() -> Capability:
    """Pairs of linked network devices."""
    why = "a veth pair leads from a sandbox's network to the host"
    trouble = complaint(["unshare", "--net", sys.executable, "-c", _VETH])
    if trouble is not None:
        return Capability("veth", "missing", True, trouble, why, "modprobe veth")
    return Capability("veth", "ok", True, "a pair was made", why, "")


# Address translation in both directions and a set with time-outs: what slots are made of.
_RULES = """
table ip aenv {
  set names { type ipv4_addr; flags timeout; }
  chain pre { type nat hook prerouting priority dstnat; iifname "a" dnat to 169.254.0.21; }
  chain post { type nat hook postrouting priority srcnat; ct state new masquerade; }
}
"""


def nftables() -> Capability:
    """Packet rules and address translation."""
    why = "it translates sandboxes' addresses and keeps them to their rules"
    trouble = complaint(["unshare", "--net", "nft", "-f", "-"], _RULES)
    if trouble is not None:
        remedy = "apt install nftables; modprobe -a nf_tables nft_chain_nat nft_masq nft_ct"
        return Capability("nftables", "missing", True, trouble, why, remedy)
    return Capability("nftables", "ok", True, "rules with address translation were accepted", why, "")


def forwarding() -> Capability:
    """Packets pass from sandboxes to the host's uplink: nobody else's rules drop them."""
    why = "without it sandboxes have no way out to the network"
    try:
        found = forward_blockers()
    except AenvError as error:
        return Capability("forwarding", "degraded", False, f"cannot be told: {error.message}", why, "")
    if found:
        return Capability("forwarding", "degraded", False, "; ".join(found), why, "nft list ruleset")
    switch = Path("/proc/sys/net/ipv4/ip_forward").read_text().strip()
    state = "on" if switch == "1" else "off for the host; a node switches it on for its own links"
    return Capability("forwarding", "ok", False, f"no rules in the way; ip_forward is {state}", why, "")


def fuse() -> Capability:
    """Filesystems served by a process."""
    why = "snapshots that are not on this host yet are read on demand through it"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Capability("fuse", "degraded", False, f"/dev/fuse: {error.strerror}", why, "modprobe fuse")
    return Capability("fuse", "ok", False, "/dev/fuse opens", why, "")


def cgroups(groups: Cgroups) -> Capability:
    """Limits on what a machine's process takes."""
    why = "they keep one machine from taking the host's memory and processors"
    names = [f"{name} (version {parent.version})" for parent in groups.parents for name in parent.controllers]
    if not groups.missing:
        return Capability("cgroups", "ok", False, ", ".join(names), why, "")
    remedy = "mount cgroup2 at /sys/fs/cgroup with the controllers cpu, io, memory and pids"
    return Capability("cgroups", "degraded", False, groups.missing, why, remedy)


def reflink(settings: Settings) -> Capability:
    """Copies that share blocks until one of them is written."""
    why = "copies of disks and memory then cost nothing"
    with _two_files(settings) as (source, target):
        source.write(b"\0" * 65536)
        source.flush()
        try:
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
        except OSError as error:
            detail = f"the filesystem of {settings.home} has none ({error.strerror})"
            remedy = "put AENV_HOME on XFS or Btrfs"
            return Capability("reflink", "degraded", False, detail, why, remedy)
    return Capability("reflink", "ok", False, "files are cloned", why, "")


def xattrs(settings: Settings) -> Capability:
    """Attributes of users on files."""
    why = "images keep their files' attributes through it"
    with _two_files(settings) as (file, _):
        try:
            os.setxattr(file.fileno(), "user.aenv", b"1")
        except OSError as error:
            detail = f"the filesystem of {settings.home} keeps none ({error.strerror})"
            remedy = "put AENV_HOME on ext4, XFS or Btrfs"
            return Capability("user xattrs", "degraded", False, detail, why, remedy)
    return Capability("user xattrs", "ok", False, "kept", why, "")


def disk(settings: Settings) -> Capability:
    """Room where images and machines' disks go."""
    free = shutil.disk_usage(_existing(settings.home)).free
    why = "images, disks and memory of machines go there"
    status = _rank(free, _LEAST_DISK, _GOOD_DISK)
    detail = f"{free / _GIB:.1f} GiB free for {settings.home}"
    remedy = "" if status == "ok" else "free some space, or set AENV_HOME to a larger filesystem"
    return Capability("disk space", status, True, detail, why, remedy)


def memory(settings: Settings, meminfo: str) -> Capability:
    """Memory for machines, from a text of /proc/meminfo."""
    available = next(int(x.split()[1]) * 1024 for x in meminfo.splitlines() if x.startswith("MemAvailable:"))
    least = (settings.memory_mib + 128) * _MIB
    status = _rank(available, least, max(2 * least, _GOOD_MEMORY))
    detail = f"{available / _GIB:.1f} GiB available; a machine takes {settings.memory_mib} MiB unless asked"
    remedy = "" if status == "ok" else "end other programs, or use a host with more memory"
    return Capability("memory", status, True, detail, "machines' memory is the host's", remedy)


def _rank(amount: int, least: int, good: int) -> Status:
    if amount < least:
        return "missing"
    return "degraded" if amount < good else "ok"


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    return next(place for place in (path, *path.parents) if place.is_dir())


@contextmanager
def _two_files(settings: Settings) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Two files on the data directory's filesystem, which vanish with the block."""
    place = _existing(settings.home)
    if not os.access(place, os.W_OK):
        place = Path(tempfile.gettempdir())
    with tempfile.TemporaryFile(dir=place) as first, tempfile.TemporaryFile(dir=place) as second:
        yield first, second


def complaint(argv: list[str], stdin: str = "") -> str | None:
    """What a command that failed complained of; None when it succeeded."""
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return f"no program {argv[0]}"
    except subprocess.TimeoutExpired:
        return f"{argv[0]} did not finish within 30 s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1][:300] if lines else f"{argv[0]} failed with status {done.returncode}"
