"""Real QEMU processes: launched, watched, ended, adopted and reaped, and nothing left of them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.config import Settings
from agentenv.errors import AenvError, Conflict, HostFault, HostIncapable, InvalidRequest, StoreFull
from agentenv.records.ledger import Ledger
from agentenv.vmm.machine import GuestFiles, Layer, MachineSpec, Nic
from agentenv.vmm.qemu.hypervisor import Qemu
from agentenv.vmm.qemu.machine import QemuMachine
from support import small_guest
from support.small_guest import READY, UID, shown, small_qemu, small_spec

pytestmark = pytest.mark.machine

PHASES = ("check", "directories", "disks", "cgroup", "spawn", "connect", "join", "run")
DOOMED = Path(__file__).parents[2] / "support" / "doomed_node.py"


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> GuestFiles:
    return small_guest.guest_files(tmp_path_factory.mktemp("guest"))


@pytest.fixture
def spec(guest: GuestFiles, nic: Nic) -> MachineSpec:
    return small_spec("m1", guest, nic)


@pytest.fixture
async def machine(qemu: Qemu, spec: MachineSpec) -> AsyncIterator[QemuMachine]:
    booted = await qemu.boot(spec)
    yield booted
    await booted.end()


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


async def test_a_machine_boots_unprivileged_and_shuts_down(
    machine: QemuMachine, qemu: Qemu, spec: MachineSpec, settings: Settings, ledger: Ledger
) -> None:
    await shown(machine, READY)
    status = status_of(machine.pid)
    assert status["Uid"].split() == status["Gid"].split() == [str(UID)] * 4
    assert status["Groups"] == ""
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    process = Path(f"/proc/{machine.pid}")
    namespace = spec.nic.namespace.stat()
    assert (process / "ns/net").stat().st_ino == namespace.st_ino
    assert os.getsid(machine.pid) == machine.pid
    groups = (process / "cgroup").read_text()
    assert qemu.cgroups.missing or groups.count(f"-{spec.id}") == len(qemu.cgroups.parents)
    variables = (process / "environ").read_bytes().split(b"\0")
    assert {entry.split(b"=")[0] for entry in variables if entry} == {
        b"AENV_HOME",
        b"AENV_MACHINE",
        b"LC_ALL",
    }
    kinds = {entry.kind for entry in ledger.entries(owner="m1")}
    assert kinds == {"directory", "cgroup", "process"}

    machine.console.send(b"busybox poweroff -f\n")
    result = await machine.wait()
    assert (result.reason, result.status) == ("shutdown", 0)
    assert machine.exited
    await machine.end()
    assert ledger.entries() == []
    assert not (settings.machines_dir / "m1").exists()


async def test_devices_are_there_by_name(machine: QemuMachine) -> None:
    blocks = await machine.qmp.execute("query-block")
    by_drive = {block["qdev"].rsplit("/", 1)[-1]: block["inserted"] for block in blocks}
    names = {name for name in by_drive if name.startswith("drive-")}
    assert names >= {"drive-root", "drive-tools", *(f"drive-spare{n}" for n in range(4))}
    assert by_drive["drive-root"]["image"]["virtual-size"] == 256 << 20
    assert not by_drive["drive-root"]["ro"]
    assert by_drive["drive-tools"]["ro"]
    assert by_drive["drive-spare0"]["image"]["virtual-size"] == 0


@pytest.mark.parametrize(
    ("typed", "reason", "detail"),
    [
        (b"busybox reboot -f\n", "shutdown", "rebooted"),
        (b"echo c >/proc/sysrq-trigger\n", "crashed", "Kernel panic"),
    ],
)
async def test_a_guest_that_ends_itself_says_how(
    machine: QemuMachine, typed: bytes, reason: str, detail: str
) -> None:
    events: list[tuple[str, dict[str, object]]] = []
    machine.on_event(lambda name, data: events.append((name, data)))
    await shown(machine, READY)
    machine.console.send(typed)
    result = await machine.wait()
    assert result.reason == reason
    assert detail in result.detail
    assert ("SHUTDOWN", {"guest": True, "reason": "guest-reset"}) in events


@pytest.mark.parametrize(
    ("number", "status", "detail"), [(signal.SIGKILL, -9, "signal 9"), (signal.SIGTERM, 0, "host-signal")]
)
async def test_a_hypervisor_killed_from_outside_has_crashed(
    machine: QemuMachine, number: int, status: int, detail: str
) -> None:
    waiting = [asyncio.create_task(machine.wait()) for _ in range(3)]
    command = asyncio.create_task(
        machine.qmp.execute("human-monitor-command", {"command-line": "info version"})
    )
    await command
    os.kill(machine.pid, number)
    results = await asyncio.gather(*waiting)
    assert {(result.reason, result.status) for result in results} == {("crashed", status)}
    assert detail in results[0].detail
    with pytest.raises(HostFault):
        await machine.qmp.execute("query-status")


async def test_ending_is_repeatable_and_goes_on_when_cancelled(machine: QemuMachine, ledger: Ledger) -> None:
    first = asyncio.create_task(machine.end())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(machine.end(), machine.end())
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await machine.wait()).reason == "ended"
    assert ledger.entries() == []
    await machine.end()


async def test_the_same_id_twice_is_refused_and_the_first_goes_on(
    machine: QemuMachine, qemu: Qemu, spec: MachineSpec
) -> None:
    with pytest.raises(Conflict, match="m1 exists"):
        await qemu.boot(spec)
    assert (await machine.qmp.execute("query-status"))["running"]


async def test_a_flooding_guest_fills_no_disk(settings: Settings, spec: MachineSpec) -> None:
    limit = 32768
    qemu, _ = small_qemu(settings.model_copy(update={"serial_log_bytes": limit}))
    machine = await qemu.boot(spec)
    try:
        await shown(machine, READY)
        machine.console.send(
            b"busybox yes filler-line-of-the-guest | busybox head -c 80000; echo FLOOD-$((1+1))\n"
        )
        await shown(machine, "FLOOD-2", limit_s=120)
        log = (settings.machines_dir / "m1" / "serial.log").read_bytes()
        assert len(log) <= limit
        assert READY.encode() in log  # the beginning is kept
        assert b"bytes left out" in log
    finally:
        await machine.end()


# What goes wrong


@pytest.mark.parametrize("moment", ["started", "complete"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_failure_at_any_step_leaves_nothing(
    settings: Settings, spec: MachineSpec, phase: str, moment: str
) -> None:
    def trace(name: str, state: str) -> None:
        if (name, state) == (phase, moment):
            raise RuntimeError(f"injected at {name}")

    qemu, ledger = small_qemu(settings, trace)
    with pytest.raises(RuntimeError, match=phase):
        await qemu.boot(spec)
    assert ledger.entries() == []
    assert list(settings.machines_dir.glob("*")) == []


@pytest.mark.parametrize("phase", PHASES)
async def test_a_cancellation_at_any_step_leaves_nothing(
    settings: Settings, spec: MachineSpec, phase: str
) -> None:
    launch: asyncio.Task[QemuMachine] | None = None

    def trace(name: str, state: str) -> None:
        if (name, state) == (phase, "started"):
            assert launch is not None
            launch.cancel()

    qemu, ledger = small_qemu(settings, trace)
    launch = asyncio.create_task(qemu.boot(spec))
    with pytest.raises(asyncio.CancelledError):
        await launch
    assert ledger.entries() == []


async def test_a_second_cancellation_does_not_stop_the_clean_up(
    settings: Settings, spec: MachineSpec
) -> None:
    launch: asyncio.Task[QemuMachine] | None = None

    def trace(name: str, state: str) -> None:
        if name == "run":
            assert launch is not None
            launch.cancel()

    qemu, ledger = small_qemu(settings, trace)
    launch = asyncio.create_task(qemu.boot(spec))
    while not launch.done():
        await asyncio.sleep(0.001)
        if launch.cancelling():
            launch.cancel()
    assert launch.cancelled()
    assert ledger.entries() == []


def without_kernel(spec: MachineSpec) -> MachineSpec:
    return replace(spec, guest=replace(spec.guest, kernel=Path("/nowhere/vmlinuz")))


def without_tap(spec: MachineSpec) -> MachineSpec:
    return replace(spec, nic=replace(spec.nic, tap="tap9"))


def without_namespace(spec: MachineSpec) -> MachineSpec:
    return replace(spec, nic=replace(spec.nic, namespace=Path("/run/netns/none-such")))


def with_small_disk(spec: MachineSpec) -> MachineSpec:
    return replace(spec, disk_mib=1, layers=(Layer(spec.guest.initramfs, "raw"),))


@pytest.mark.parametrize(
    ("spoil", "kind", "said"),
    [
        (without_kernel, HostIncapable, "aenv setup"),
        (without_tap, HostFault, "no such tap"),
        (without_namespace, HostFault, "none-such"),
        (with_small_disk, InvalidRequest, "smaller than its image"),
        (lambda spec: replace(spec, uid=0), InvalidRequest, "uid 0"),
        (lambda spec: replace(spec, id="../m"), InvalidRequest, "id"),
    ],
)
async def test_what_cannot_work_is_refused_with_the_reason(
    qemu: Qemu,
    ledger: Ledger,
    spec: MachineSpec,
    spoil: Callable[[MachineSpec], MachineSpec],
    kind: type[AenvError],
    said: str,
) -> None:
    with pytest.raises(kind) as caught:
        await qemu.boot(spoil(spec))
    assert said in str(caught.value)
    assert ledger.entries() == []


def program(directory: Path, body: str) -> str:
    path = directory / "qemu"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (None, HostIncapable, "no QEMU"),
        ("echo QEMU emulator version 7.2.9", HostIncapable, "8.2 or newer"),
        ("echo something else", HostIncapable, "does not say that it is QEMU"),
        ("echo QEMU emulator version 9.9.9", HostIncapable, "is no program of its own"),
    ],
)
async def test_a_qemu_that_will_not_do_is_told_with_the_reason(
    settings: Settings, spec: MachineSpec, body: str | None, kind: type[AenvError], said: str
) -> None:
    directory = settings.runtime_dir
    directory.mkdir()
    path = "/nowhere/qemu" if body is None else program(directory, body)
    qemu, ledger = small_qemu(settings.model_copy(update={"qemu": path}))
    with pytest.raises(kind) as caught:
        await qemu.boot(spec)
    assert said in str(caught.value)
    assert ledger.entries() == []
    shutil.rmtree(directory)


async def test_a_qemu_that_ends_at_once_is_told_with_its_last_words(
    qemu: Qemu, ledger: Ledger, spec: MachineSpec, tmp_path: Path
) -> None:
    kernel = tmp_path / "kernel"
    kernel.write_bytes(b"no kernel at all")
    with pytest.raises(HostFault, match=r"ended with 1 at its start: .*kernel"):
        await qemu.boot(replace(spec, guest=replace(spec.guest, kernel=kernel)))
    assert ledger.entries() == []


async def test_a_full_disk_is_no_room(tmp_path: Path, settings: Settings, spec: MachineSpec) -> None:
    settings.machines_dir.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", settings.machines_dir], check=True)
    try:
        qemu, ledger = small_qemu(settings)
        with pytest.raises(StoreFull, match="MiB are free"):
            await qemu.boot(spec)
        assert ledger.entries() == []
    finally:
        subprocess.run(["umount", settings.machines_dir], check=True)


# A node that dies


def doomed(
    settings: Settings, spec: MachineSpec, tmp_path: Path, *, die_at: str = "", until: str = ""
) -> int:
    """Launch a machine in another process, kill that one, and return the machine's pid if it told."""
    given = {
        "home": str(settings.home),
        "runtime": str(settings.runtime_dir),
        "id": spec.id,
        "uid": spec.uid,
        "guest": [str(spec.guest.kernel), str(spec.guest.initramfs), str(spec.guest.tools)],
        "namespace": str(spec.nic.namespace),
        "tap": spec.nic.tap,
        "mac": spec.nic.mac,
        "die_at": die_at,
        "await": until,
    }
    description = tmp_path / "doomed.json"
    description.write_text(json.dumps(given))
    with subprocess.Popen([sys.executable, DOOMED, description], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        line = node.stdout.readline()
        node.kill()
    return int(line or 0)


async def test_a_machine_outlives_its_node_and_is_adopted(
    settings: Settings, spec: MachineSpec, tmp_path: Path
) -> None:
    pid = doomed(settings, spec, tmp_path, until=READY)
    qemu, ledger = small_qemu(settings)
    machine = await qemu.adopt(spec)
    assert machine is not None
    try:
        assert machine.pid == pid
        assert (await machine.qmp.execute("query-status"))["running"]
        assert READY in machine.console.tail(4096)  # the log that the dead node began
        machine.console.send(b"echo still-$((40+2))\n")
        await shown(machine, "still-42")
        assert await qemu.reap({spec.id}) == []
        assert not machine.exited
        machine.console.send(b"busybox poweroff -f\n")
        result = await machine.wait()
        assert (result.reason, result.status) == ("shutdown", None)
    finally:
        await machine.end()
    assert ledger.entries() == []


async def test_a_detached_machine_can_be_adopted_and_is_not_ours_to_end(
    qemu: Qemu, spec: MachineSpec
) -> None:
    first = await qemu.boot(spec)
    waiter = asyncio.create_task(first.wait())
    await asyncio.sleep(0)
    first.detach()
    with pytest.raises(HostFault, match="let go"):
        await waiter
    with pytest.raises(HostFault, match="let go"):
        await first.end()
    second = await qemu.adopt(spec)
    assert second is not None
    assert second.pid == first.pid
    await second.end()
    assert await qemu.adopt(spec) is None


@pytest.mark.parametrize("phase", [*PHASES, "recording"])
async def test_what_a_dead_node_left_is_reaped(
    settings: Settings, spec: MachineSpec, tmp_path: Path, phase: str
) -> None:
    assert doomed(settings, spec, tmp_path, die_at=phase) == 0
    qemu, ledger = small_qemu(settings)
    left = bool(ledger.entries())
    assert left == (phase not in ("check", "directories"))
    assert await qemu.reap(set()) == (["m1"] if left else [])
    assert ledger.entries() == []


@pytest.mark.parametrize("phase", ["connect", "run", "recording"])
async def test_a_launch_cut_off_after_its_start_is_finished_by_adoption(
    settings: Settings, spec: MachineSpec, tmp_path: Path, phase: str
) -> None:
    doomed(settings, spec, tmp_path, die_at=phase)
    qemu, _ = small_qemu(settings)
    machine = await qemu.adopt(spec)
    assert machine is not None
    try:
        assert (await machine.qmp.execute("query-status"))["running"]
    finally:
        await machine.end()


async def test_adopting_what_has_ended_gives_none(
    settings: Settings, spec: MachineSpec, tmp_path: Path
) -> None:
    pid = doomed(settings, spec, tmp_path)
    os.kill(pid, signal.SIGKILL)
    qemu, ledger = small_qemu(settings)
    assert await qemu.adopt(spec) is None
    assert await qemu.reap(set()) == ["m1"]
    assert ledger.entries() == []
