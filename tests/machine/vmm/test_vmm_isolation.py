"""What a machine's process can reach of its host, tried from where it is: docs/explanation/security.md."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agentenv.config import Settings
from agentenv.vmm import bounds
from agentenv.vmm.qemu.hypervisor import Qemu
from agentenv.vmm.qemu.launch import bounds_of
from agentenv.vmm.qemu.machine import QemuMachine
from support import small_guest
from support.inside_machine import ask
from support.small_guest import UID, small_spec

pytestmark = pytest.mark.machine

KINDS = ("mnt", "pid", "net", "ipc", "uts")


@pytest.fixture
async def machines(
    qemu: Qemu, tmp_path: Path, host_audit: None
) -> AsyncIterator[tuple[QemuMachine, QemuMachine]]:
    """Two machines, of users of their own."""
    guest = small_guest.guest_files(tmp_path)
    with ExitStack() as made:
        nics = [made.enter_context(small_guest.tap_namespace(f"apart{n}x{os.getpid()}")) for n in range(2)]
        booted = [await qemu.boot(small_spec(f"m{n}", guest, nic)) for n, nic in enumerate(nics)]
        yield booted[0], booted[1]
        for machine in booted:
            await machine.end()


def namespaces_of(pid: int) -> dict[str, str]:
    return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS}


def lines_of(path: Path) -> dict[str, str]:
    return {
        key: value.strip()
        for key, _, value in (line.partition(":") for line in path.read_text().splitlines())
    }


async def test_the_process_has_no_rights_and_nothing_in_common_with_others(
    machines: tuple[QemuMachine, QemuMachine],
) -> None:
    one, other = (namespaces_of(machine.pid) for machine in machines)
    here = namespaces_of(os.getpid())
    assert all(len({one[kind], other[kind], here[kind]}) == 3 for kind in KINDS)
    status = lines_of(Path(f"/proc/{machines[0].pid}/status"))
    assert status["NSpid"].split()[-1] == "1"
    assert {status[name].split()[0] for name in ("Uid", "Gid")} == {str(UID)}
    assert status["Groups"] == ""
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


async def test_the_process_sees_its_programs_and_nothing_else_of_the_host(
    machines: tuple[QemuMachine, QemuMachine], settings: Settings
) -> None:
    pid, other = machines[0].pid, machines[1].pid
    sockets = settings.runtime_dir / "machines/m1"
    node = asyncio.create_task(asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0))
    async with await node as server:
        answers = await asyncio.to_thread(
            ask,
            pid,
            UID,
            list=["/", "/machine", "/proc", "/run", "/dev", "/sys", str(settings.home), "/usr/bin", "/etc"],
            open=[
                *(str(settings.home), str(settings.database), "/etc/passwd", "/dev/kvm", "/proc/self/maps"),
                str(settings.machines_dir / "m1"),
            ],
            write=["/x", "/machine/memory", "/machine/kernel"],
            unix=[str(sockets / name) for name in ("qmp", "console")],
            tcp=[("127.0.0.1", server.sockets[0].getsockname()[1]), ("10.0.0.1", 80)],
            kill=[pid, other, os.getpid()],
        )
    missing = "No such file or directory"
    root, given, *absent = answers["list"]
    assert set(root.split()) <= {"bin", "etc", "lib", "lib32", "lib64", "libx32", "machine", "sbin", "usr"}
    assert set(given.split()) == {"memory", "kernel", "initramfs"}
    *absent, programs, configuration = absent
    assert set(absent) == {missing}
    assert set(programs.split()) == {"prlimit", "qemu-system-x86_64", "setpriv"}
    assert configuration == "ld.so.cache"
    assert set(answers["open"]) == {missing}
    assert answers["write"] == ["Read-only file system", "done", "Permission denied"]  # its memory is its own
    mounted = [line.split()[4:6] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    assert len(mounted) > 10
    for place, options in mounted:
        assert {"nosuid", "nodev"} <= set(options.split(",")), place
        assert ("ro" in options.split(",")) == (place != "/machine/memory"), place
    assert set(answers["unix"]) == {missing}
    assert set(answers["kill"]) == {"No such process"}
    assert "done" not in answers["tcp"]
    assert answers["host"] == "machine"


async def test_the_limits_of_the_process_are_in_force(
    machines: tuple[QemuMachine, QemuMachine], qemu: Qemu
) -> None:
    machine = machines[0]
    wanted = bounds_of(machine.spec)
    limits = {
        line[:26].strip(): line[26:].split()[:2]
        for line in Path(f"/proc/{machine.pid}/limits").read_text().splitlines()
    }
    assert limits["Max core file size"] == ["1", "1"]
    assert limits["Max file size"] == [str(wanted.file_bytes)] * 2
    assert limits["Max processes"] == [str(wanted.tasks)] * 2
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert limits["Max open files"] == [str(min(bounds.FILES, most))] * 2
    assert limits["Max realtime priority"] == ["0", "0"]
    joined = Path(f"/proc/{machine.pid}/cgroup").read_text()
    assert joined.count(f"-{machine.spec.id}\n") == len(qemu.cgroups.parents)
