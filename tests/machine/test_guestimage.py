"""What `setup` made, booted: an empty image, an odd one, none at all, and the verdict on KVM.

The machines are started by hand here, without the rest of the platform. In place of the agent runs a
program that tells what it finds on the console.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv import config
from agentenv.guestimage import build, drive, manifest, tools
from agentenv.guestimage.initramfs import MARKER
from agentenv.host import kvm, tsc
from agentenv.vmm.machine import GuestFiles
from agentenv.vmm.qemu.command import Emulation, kernel_command_line

pytestmark = pytest.mark.machine

LIMIT_S = 120
PROGRAM = """
import json, os, resource, subprocess, sys

def text(path):
    with open(path) as stream:
        return stream.read().strip()

print("FOUND " + json.dumps({
    "pid": os.getpid(),
    "argv": sys.argv[1:],
    "name": text("/proc/1/comm"),
    "path": sys.path,
    "top": sorted(os.listdir("/")),
    "mounts": {line.split()[1]: line.split()[2:4] for line in text("/proc/mounts").splitlines()},
    "resolver": text("/etc/resolv.conf"),
    "resolver_is_link": os.path.islink("/etc/resolv.conf"),
    "hostname": os.uname().nodename,
    "tmp": os.stat("/tmp").st_mode & 0o7777,
    "routes": text("/proc/net/route").splitlines()[1:],
    "ipv6": text("/proc/sys/net/ipv6/conf/eth0/disable_ipv6"),
    "links": text("/proc/sys/fs/protected_hardlinks"),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    "controllers": text("/sys/fs/cgroup/cgroup.controllers").split(),
    "devices": sorted(os.listdir("/dev")),
    "kept": text("/kept") if os.path.exists("/kept") else None,
}), flush=True)
os.sync()
subprocess.run(["/.agentenv/bin/busybox", "reboot", "-f"])
"""

Boot = Callable[[Path | None], str]


@pytest.fixture(scope="module")
def guest() -> GuestFiles:
    return build.load(config.load())


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory, guest: GuestFiles) -> Path:
    """A tools drive whose agent is the program above."""
    work = tmp_path_factory.mktemp("tools")
    directory = config.load().guest_dir
    made = manifest.read(directory)
    assert made is not None
    tree = work / "tree"
    tree.mkdir()
    tools.fill(tree, directory / made.busybox.file)
    source = work / "program.py"
    source.write_text(PROGRAM)
    version = tools.interpreter().version
    for name, path in tools.interpreter().library.closure([source]).items():
        tools.add_module(tree / f"lib/python{version}", name, path)
    tools.compile_to(
        source, (tree / f"lib/python{version}" / tools.AGENT_PROGRAM).with_suffix(".py"), "program"
    )
    drive.make(tree, work / "tools")
    shutil.rmtree(tree)
    return work / "tools"


@pytest.fixture
def boot(guest: GuestFiles, telling: Path) -> Boot:
    """Boots with a root disk, or none, and returns the console once the machine has ended."""

    def run(root: Path | None) -> str:
        words = kernel_command_line(Emulation("tcg", tsc.khz(), 32))
        argv = ["qemu-system-x86_64", "-machine", "microvm", "-accel", "tcg", "-cpu", "max", "-m", "256M"]
        argv += ["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"]
        argv += ["-kernel", str(guest.kernel), "-initrd", str(guest.initramfs), "-append", words]
        argv += ["-netdev", "user,id=network,restrict=on", "-device", "virtio-net-device,netdev=network"]
        for serial, path in (("tools", telling), ("root", root)):
            if path is not None:
                node = {"driver": "raw", "node-name": serial, "read-only": serial == "tools"}
                file = {"driver": "file", "filename": str(path)}
                argv += ["-blockdev", json.dumps({**node, "file": file})]
                argv += ["-device", f"virtio-blk-device,drive={serial},serial={serial}"]
        done = subprocess.run(
            argv, capture_output=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode(errors="replace")

    return run


def disk(directory: Path, tree: Path) -> Path:
    image = directory / "root.ext4"
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", tree, image, "64M"], check=True, capture_output=True)
    return image


def found(console: str) -> dict[str, object]:
    lines = [line for line in console.splitlines() if line.startswith("FOUND ")]
    assert lines, console
    value: dict[str, object] = json.loads(lines[0].removeprefix("FOUND "))
    return value


def test_an_empty_image_gets_all_that_an_agent_needs(boot: Boot, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    facts = found(boot(disk(tmp_path, tmp_path / "tree")))
    assert facts["pid"] == 1
    assert facts["argv"] == ["--init"]
    assert facts["name"] == "agentenv"
    assert facts["path"] == [
        f"/.agentenv/lib/python{suffix}"
        for version in [tools.interpreter().version]
        for suffix in (version.replace(".", "") + ".zip", version, f"{version}/lib-dynload")
    ]
    assert facts["top"] == [".agentenv", "dev", "etc", "lost+found", "proc", "run", "sys", "tmp"]
    assert facts["resolver"] == "nameserver 169.254.0.22"
    assert facts["hostname"] == "sandbox"
    assert facts["tmp"] == 0o1777
    assert facts["ipv6"] == "1"
    assert facts["links"] == "1"
    assert facts["files"] == 524288
    assert {"cpu", "memory", "pids"} <= set(facts["controllers"])  # type: ignore[call-overload]
    assert {"null", "pts", "shm", "tty", "urandom"} <= set(facts["devices"])  # type: ignore[call-overload]
    gateway = bytes([169, 254, 0, 22])[::-1].hex().upper()
    assert any(gateway in line for line in facts["routes"])  # type: ignore[attr-defined]
    mounts = facts["mounts"]
    assert isinstance(mounts, dict)
    assert mounts["/"][0] == "ext4"
    assert mounts["/"][1].startswith("rw,noatime")
    assert mounts["/.agentenv"][1].startswith("ro,")
    kinds = {"/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs", "/dev/pts": "devpts", "/dev/shm": "tmpfs"}
    kinds |= {"/run": "tmpfs", "/sys/fs/cgroup": "cgroup2"}
    assert {place: mounts[place][0] for place in kinds} == kinds


def test_what_an_image_has_is_kept_or_mended(boot: Boot, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/resolv.conf").symlink_to("/run/systemd/resolve/stub-resolv.conf")
    (tree / "etc/hostname").write_text("image-name\n")
    (tree / "tmp").mkdir(mode=0o700)
    (tree / "kept").write_text("as it was")
    image = disk(tmp_path, tree)
    facts = found(boot(image))
    assert facts["resolver"] == "nameserver 169.254.0.22"
    assert facts["resolver_is_link"] is False
    assert facts["hostname"] == "image-name"
    assert facts["tmp"] == 0o1777
    assert facts["kept"] == "as it was"
    subprocess.run(["e2fsck", "-p", image], check=False, capture_output=True)
    subprocess.run(["e2fsck", "-f", "-n", image], check=True, capture_output=True)


def test_without_a_root_disk_the_machine_says_so_and_ends(boot: Boot) -> None:
    assert f"{MARKER} no disk with the serial 'root'" in boot(None)


def test_a_disk_that_is_no_filesystem_is_told(boot: Boot, tmp_path: Path) -> None:
    blank = tmp_path / "blank"
    blank.write_bytes(bytes(1 << 20))
    assert f"{MARKER} cannot mount the root disk" in boot(blank)


@pytest.mark.skipif(kvm.cannot_open(kvm.DEVICE) is not None, reason="no /dev/kvm here")
def test_the_verdict_on_kvm_is_that_of_a_boot(guest: GuestFiles) -> None:
    known = kvm.verdict(config.load())
    assert known.reason
    assert kvm.probe(config.load().qemu, guest).usable is known.usable


def test_where_guests_need_other_kernels_kvm_is_found_unusable(guest: GuestFiles) -> None:
    if not Path("/sys/module/kvm_pvm").is_dir():
        pytest.skip("this host's KVM is an ordinary one, or absent")
    assert not kvm.probe(config.load().qemu, guest).usable
