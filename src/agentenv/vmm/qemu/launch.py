"""Launching a machine: each step recorded before it is taken, and undone when a later one fails.

Two stacks: `handed` holds what the new process has inherited by then and is always closed here;
`undo` holds what makes up the machine and is unwound only on failure.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from agentenv.config import Settings, hash_path
from agentenv.errors import Conflict, HostFault, HostIncapable, InvalidRequest, StoreCorrupt, StoreFull
from agentenv.vmm import cgroup, mounts, namespace, process, sockets
from agentenv.vmm.bounds import Bounds, confined
from agentenv.vmm.cgroup import Limits
from agentenv.vmm.console import Console, SerialLog
from agentenv.vmm.machine import DRIVES_MOST, Layer, MachineSpec, SavedState
from agentenv.vmm.output import BoundedOutput
from agentenv.vmm.process import Identity, Process
from agentenv.vmm.qemu import faults, overlay
from agentenv.vmm.qemu.capture import SHARED_MODE
from agentenv.vmm.qemu.command import (
    Descriptors,
    DriveFiles,
    Emulation,
    boot_command,
    restore_command,
    state_of,
)
from agentenv.vmm.qemu.lineage import Lineage, disks_of
from agentenv.vmm.qemu.machine import QemuMachine
from agentenv.vmm.qemu.qmp import Qmp, QmpBroken
from agentenv.vmm.qemu.steps import Steps, Trace
from agentenv.vmm.resources import TOKEN, Resources
from agentenv.vmm.settle import settled
from agentenv.vmm.view import View

MIB = 1 << 20

# The hypervisor's own memory besides the guest's and the translation buffer: code, heap, block caches,
# device models; the page cache of its files is charged to the group too and is reclaimed first.
_OVERHEAD_MIB = 192
_OWN_CPU = 0.5  # processors for the hypervisor's own threads
_TASKS = 128  # the block layer's pool alone has up to 64 threads
_TABLES_SHARE = 64  # at most that part of a layer besides what it holds (qcow2's tables are a thousandth)
_SPARE_MIB = 64  # free space that must remain besides a machine's memory file

_READY_LIMIT_S = 60.0


@dataclass(frozen=True)
class Site:
    """Where and how one node's machines are launched."""

    settings: Settings
    resources: Resources
    program: str
    emulation: Emulation
    view: View | None = None  # what launches need
    kvm_device: Path | None = None
    trace: Trace | None = None

    def machine_dir(self, machine_id: str) -> Path:
        """Disk layer, memory file and serial log."""
        return self.settings.machines_dir / machine_id

    def socket_dir(self, machine_id: str) -> Path:
        """QMP and console sockets."""
        return self.settings.runtime_dir / "machines" / machine_id

    def group_name(self, machine_id: str) -> str:
        """Name of the machine's control groups: other data directories' machines have other ones."""
        return f"aenv-{hash_path(self.settings.home):08x}-{machine_id}"


async def launch(spec: MachineSpec, site: Site) -> QemuMachine:
    """A machine whose process runs and whose guest begins to boot; on failure nothing is left.

    Raises:
        InvalidRequest: the specification cannot be right.
        HostIncapable: the host lacks something for good.
        CapacityExceeded, StoreFull: no room now.
        HostFault: anything else that the host or QEMU refused.
    """
    async with launching(spec, site) as steps:
        machine = await steps.start()
        with steps.phase("run", "starting the vcpus"):
            await machine.run()
        return machine


@asynccontextmanager
async def launching(spec: MachineSpec, site: Site, saved: SavedState | None = None) -> AsyncIterator[Launch]:
    """The steps of a launch, all of which are undone when the block fails."""
    undo = AsyncExitStack()
    try:
        with ExitStack() as handed:
            yield Launch(spec, site, saved, handed, undo)
    except BaseException:
        await settled(undo.aclose())
        raise
    undo.pop_all()


class Launch:
    """One launch: what the steps share. With a saved state the process waits for it to be loaded."""

    def __init__(
        self,
        spec: MachineSpec,
        site: Site,
        saved: SavedState | None,
        handed: ExitStack,
        undo: AsyncExitStack,
    ) -> None:
        self._spec = spec
        self._site = site
        self._saved = saved
        self._handed = handed
        self._undo = undo
        self._steps = Steps(site.trace)
        self._groups: list[Path] = []
        self._directory = site.machine_dir(spec.id)
        self._sockets = site.socket_dir(spec.id)
        _, *drives = disks_of(self._directory, spec)
        image = saved.memory if saved else None
        self._lineage = Lineage(self._directory, spec.layers, image=image, drives=tuple(drives))
        self.state_uri = ""
        self.phase = self._steps.phase

    async def start(self) -> QemuMachine:
        """A machine whose process runs in its limits, and whose vcpus do not run."""
        phase = self.phase
        with phase("check", "checking what the machine needs"):
            check(self._spec, self._site, 0 if self._saved else self._spec.memory_mib)
        with phase("directories", "making the machine's directories"):
            self._make_directories()
        with phase("disks", "making the machine's disk and memory files"):
            descriptors = self._open_files()
        with phase("cgroup", "making the machine's control groups"):
            self._make_groups()
        with phase("spawn", "starting QEMU"):
            running, output = await self._spawn(descriptors)
        self._handed.close()  # with its listening sockets only QEMU's, a death of QEMU is seen at once
        with phase("connect", "connecting to QEMU"):
            # Moving a process waits for a grace period of the kernel's, some milliseconds per group:
            # meanwhile QEMU starts. Its vcpus wait for `run`, so nothing of the guest escapes the limits.
            joining = asyncio.create_task(asyncio.to_thread(self._join_groups, running.pid))
            try:
                qmp, console = await self._connect(running, output)
            finally:
                await settled(_done(joining))
        with phase("join", "putting QEMU into its control groups"):
            joining.result()
        resources, seconds = self._site.resources, self._steps.seconds
        machine = QemuMachine(
            self._spec, running, qmp, console, output, resources, self._lineage, self._site.trace, seconds
        )
        self._undo.callback(machine.detach)
        return machine

    def _make_directories(self) -> None:
        resources, owner = self._site.resources, self._spec.id
        self._undo.push_async_callback(resources.release_all, owner)
        for path in (self._directory, self._sockets):
            path.parent.mkdir(parents=True, exist_ok=True)
            resources.make_directory(owner, path)

    def _open_files(self) -> Descriptors:
        spec, guest, saved = self._spec, self._spec.guest, self._saved
        size = overlay.size_at_start(spec, saved=saved is not None)
        qmp = self._handed.enter_context(sockets.listen(self._sockets / "qmp"))
        console = self._handed.enter_context(sockets.listen(self._sockets / "console"))
        kvm = self._site.kvm_device
        return Descriptors(
            memory=self._open_base(saved.memory.base) if saved else self._make_memory(),
            kernel=None if saved else self._open(guest.kernel),
            initramfs=None if saved else self._open(guest.initramfs),
            state=self._open_saved(saved.device_state) if saved else None,
            tools=self._open(guest.tools),
            layers=self._open_layers(spec.layers),
            disk=self._make_disk(self._lineage.disk, size),
            tap=-1,
            qmp=qmp.fileno(),
            console=console.fileno(),
            kvm=self._open(kvm, os.O_RDWR) if kvm else None,
            drives=self._open_drives(),
        )

    def _open_drives(self) -> tuple[DriveFiles, ...]:
        own = {disk.drive: disk.file() for disk in self._lineage.drives}
        return tuple(
            DriveFiles(
                self._open_layers(drive.layers),
                self._make_disk(own[index], drive.disk_mib * MIB) if drive.writable else None,
            )
            for index, drive in enumerate(self._spec.drives)
        )

    def _open_layers(self, layers: tuple[Layer, ...]) -> tuple[int, ...]:
        return tuple(self._open_saved(layer.path) for layer in layers)

    def _make_disk(self, path: Path, size: int) -> tuple[int, int]:
        """An empty layer of `size` bytes to write to, open twice (see Descriptors)."""
        writable = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        overlay.write_empty(writable, size)
        return writable, self._open(path)

    def _make_memory(self) -> int:
        spec = self._spec
        ram = self._open(self._lineage.memory, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.ftruncate(ram, spec.memory_mib * MIB)
        os.fchown(ram, spec.uid, spec.uid)  # QEMU opens it anew, by its name
        return ram

    def _open_base(self, path: Path) -> int:
        base = self._open_saved(path)
        if not os.fstat(base).st_mode & stat.S_IROTH:
            os.fchmod(base, SHARED_MODE)
        return base

    def _open(self, path: Path, flags: int = os.O_RDONLY) -> int:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._handed.callback(os.close, descriptor)
        return descriptor

    def _open_saved(self, path: Path) -> int:
        try:
            return self._open(path)
        except FileNotFoundError as error:
            raise StoreCorrupt(f"{path} is missing") from error

    def _make_groups(self) -> None:
        resources, spec = self._site.resources, self._spec
        buffer_mib = self._site.emulation.buffer_of(spec.memory_mib)
        limits = Limits(
            cpus=spec.vcpus + _OWN_CPU,
            memory_bytes=(spec.memory_mib + buffer_mib + _OVERHEAD_MIB) * MIB,
            tasks=tasks_of(spec),
        )
        entry = resources.record_cgroup(spec.id, self._site.group_name(spec.id))
        resources.make_cgroup(entry, limits)
        self._groups = resources.groups(spec.id)

    async def _spawn(self, descriptors: Descriptors) -> tuple[Process, BoundedOutput]:
        spec, site = self._spec, self._site
        token = secrets.token_hex(16)
        if self._saved:
            self.state_uri = state_of(descriptors)
        output = BoundedOutput.create(f"stderr of {spec.id}")
        self._undo.callback(output.close)
        entry = site.resources.record_process(spec.id, token, **self._lineage.detail())
        environment = {
            "AENV_HOME": str(site.settings.home),
            TOKEN: token,
            "LC_ALL": "C",
        }

        view = site.view
        assert view is not None
        before = confined(spec.uid, bounds_of(spec))
        nothing = self._open(Path(os.devnull))

        def start() -> int:
            # What is opened from here on, the tap, is this thread's and goes with it.
            mounts.unshare(mounts.CLONE_FILES)
            given = replace(descriptors, tap=namespace.open_tap(spec.nic.tap))
            command = restore_command if self._saved else boot_command
            argv = [*before, *command(site.program, spec, given, site.emulation)]
            view.enter(given.seen())
            return process.spawn(argv, environment, given.all(), nothing=nothing, output=output.descriptor)

        async def start_and_record() -> Identity:
            # On a thread, since it takes milliseconds.
            pid = await asyncio.to_thread(namespace.inside, spec.nic.namespace, start)
            identity = process.identify(pid)
            site.resources.started(entry, identity)
            return identity

        identity = await settled(start_and_record())
        running = process.watch(identity)
        assert running is not None  # our child, not waited for yet
        self._undo.callback(running.release)
        return running, output

    def _join_groups(self, pid: int) -> None:
        try:
            cgroup.join(self._groups, pid)
        except ProcessLookupError:
            pass  # dead already; connecting finds out why

    async def _connect(self, running: Process, output: BoundedOutput) -> tuple[Qmp, Console]:
        limit = self._site.settings.serial_log_bytes
        try:
            serial = SerialLog(self._directory / "serial.log", limit)
            self._undo.callback(serial.close)
            console = Console(sockets.connect(self._sockets / "console"), serial)
            self._undo.callback(console.close)
            qmp = await Qmp.connect(self._sockets / "qmp", timeout=_READY_LIMIT_S)
        except (QmpBroken, ConnectionRefusedError) as error:
            async with asyncio.timeout(_READY_LIMIT_S):
                status = await running.wait()
            raise faults.of_early_end(status, output.last_line()) from error
        self._undo.callback(qmp.close)
        return qmp, console


def check(spec: MachineSpec, site: Site, memory_file_mib: int) -> None:
    """Refuse, before anything is made, what cannot work; `memory_file_mib` may go to a memory file.

    Raises:
        AenvError: see `launch`.
    """
    if os.geteuid() != 0:
        raise HostIncapable("machines need root on the host", remedy="run the node as root")
    if not spec.id.isascii() or not spec.id.replace("-", "").replace("_", "").isalnum():
        raise InvalidRequest(f"{spec.id!r} cannot be a machine's id")
    if site.resources.entries(spec.id):
        raise Conflict(f"machine {spec.id} exists, or what is left of it", remedy="end it first, or reap it")
    if spec.uid <= 0:
        raise InvalidRequest(f"a machine's process does not run as uid {spec.uid}")
    for path in (spec.guest.kernel, spec.guest.initramfs, spec.guest.tools):
        _check_guest_file(path)
    if not spec.nic.namespace.exists():
        raise HostFault(f"there is no network namespace {spec.nic.namespace}")
    if len(spec.drives) > DRIVES_MOST:
        raise InvalidRequest(
            f"{len(spec.drives)} drives are more than the {DRIVES_MOST} that there are places for"
        )
    _require_size(spec.layers, spec.disk_mib)
    for drive in spec.drives:
        if drive.writable:
            _require_size(drive.layers, drive.disk_mib)
    site.settings.machines_dir.mkdir(parents=True, exist_ok=True)
    free_mib = shutil.disk_usage(site.settings.machines_dir).free // MIB
    if free_mib < memory_file_mib + _SPARE_MIB:
        raise StoreFull(
            f"{free_mib} MiB are free for a machine whose memory file alone can take {memory_file_mib} MiB",
            remedy=f"free space where {site.settings.machines_dir} is",
        )


def tasks_of(spec: MachineSpec) -> int:
    """How many threads a machine's process may have."""
    return _TASKS + spec.vcpus


def bounds_of(spec: MachineSpec) -> Bounds:
    """What holds for a machine's process. No file of it grows beyond what its guest could fill, so that a
    hypervisor that was broken into does not fill the host's disk."""
    disks = (drive.disk_mib for drive in spec.drives if drive.writable)
    largest = max(spec.memory_mib, spec.disk_mib, *disks) * MIB
    return Bounds(largest + largest // _TABLES_SHARE + _SPARE_MIB * MIB, tasks_of(spec))


def _require_size(layers: tuple[Layer, ...], disk_mib: int) -> None:
    sizes = [overlay.virtual_size(layer) for layer in layers]
    if sizes and max(sizes) > disk_mib * MIB:
        need = -(-max(sizes) // MIB)
        raise InvalidRequest(f"a disk of {disk_mib} MiB is smaller than its image's {need} MiB")


def _check_guest_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise HostIncapable(
            f"the guest's {path.name} is missing: {path}: {error.strerror}", remedy="run `aenv setup`"
        ) from error
    if not mode & stat.S_IROTH:
        raise HostIncapable(
            f"machines' users cannot read {path}", remedy=f"chmod o+r {path}, or run `aenv setup` again"
        )


async def _done(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})
