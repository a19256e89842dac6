"""Capturing a stopped machine: device state, memory, and a sealed disk layer.

All that may lack space is done before the disk is sealed, which comes last: until then a failure
leaves the machine as it was.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentenv.errors import Conflict, HostFault, OutcomeUnknown, StoreCorrupt
from agentenv.vmm import memory
from agentenv.vmm.machine import Capture, Layer, MachineSpec, MemoryImage
from agentenv.vmm.qemu import overlay
from agentenv.vmm.qemu.command import overlay_node
from agentenv.vmm.qemu.lineage import Disk, Lineage
from agentenv.vmm.qemu.qmp import Command, Qmp
from agentenv.vmm.qemu.steps import Steps
from agentenv.vmm.stored import map_of, new_files
from agentenv.vmm.transfer import PAGE

log = logging.getLogger(__name__)

MIB = 1 << 20

_STATE_LIMIT_S = 60.0
_SEAL_LIMIT_S = 60.0
_STATE_MAGIC = b"QEVM"
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)

# Of a flat memory file: QEMU opens it as the machine's user, who has no other way to it than a
# descriptor, and nobody ever writes to it.
SHARED_MODE = 0o444


async def capture(
    spec: MachineSpec, pid: int, qmp: Qmp, lineage: Lineage, into: Path, steps: Steps, *, final: bool
) -> tuple[Capture, Lineage]:
    """Capture a machine; see `agentenv.vmm.machine.Machine.capture`. Not to be cancelled.

    Returns also what the machine consists of from now on.
    """
    status, blocks = await qmp.together(("query-status", None), ("query-block", None))
    if status["running"]:
        raise Conflict(f"machine {spec.id} runs", remedy="stop it before it is captured")
    if _tops(blocks, lineage.disks) != _nodes(lineage.disks):
        # QEMU may have finished what it did not answer in time: a capture would miss what was written.
        raise HostFault(f"machine {spec.id} writes to another disk layer than the last one known of it")
    async with AsyncExitStack() as undo:
        work = _Capture(spec, pid, qmp, lineage, into, steps, undo)
        captured = await (work.final() if final else work.going_on())
        undo.pop_all()
    return captured


async def top_nodes(qmp: Qmp, disks: Sequence[Disk]) -> tuple[str, ...]:
    """The block node that each of a machine's disks is written to."""
    return _tops(await qmp.execute("query-block"), disks)


def _tops(blocks: list[dict[str, Any]], disks: Sequence[Disk]) -> tuple[str, ...]:
    return tuple(_top(blocks, disk.device) for disk in disks)


def _top(blocks: list[dict[str, Any]], device: str) -> str:
    for block in blocks:
        if device in block.get("qdev", ""):
            return str(block["inserted"]["node-name"])
    raise HostFault(f"QEMU knows of no {device}")


def _nodes(disks: Sequence[Disk], above: int = 0) -> tuple[str, ...]:
    return tuple(disk.node(above) for disk in disks)


def _new_set() -> int:
    """A number for a set of descriptors that no other one has, nor one left by an earlier node."""
    return secrets.randbelow(1 << 30) + (1 << 20)  # QEMU reads it as an int


class _Capture:
    """One capture: what its steps share. `undo` is unwound unless all succeed."""

    def __init__(
        self,
        spec: MachineSpec,
        pid: int,
        qmp: Qmp,
        lineage: Lineage,
        into: Path,
        steps: Steps,
        undo: AsyncExitStack,
    ) -> None:
        self._spec = spec
        self._pid = pid
        self._qmp = qmp
        self._lineage = lineage
        self._into = into
        self._undo = undo
        self._seconds = steps.seconds
        self._phase = steps.phase

    async def final(self) -> tuple[Capture, Lineage]:
        """Of a machine that is about to end: it keeps its layer, and its memory file if it has one."""
        with self._phase("state", "saving the device state"):
            state = await self._device_state()
        with self._phase("memory", "saving the memory"):
            image, pages = await self._memory(_share)
        with self._phase("disk", "saving the disk"):
            stacks = self._stacks()
        return self._result(state, image, pages, stacks), self._lineage

    async def going_on(self) -> tuple[Capture, Lineage]:
        """Of a machine that goes on, in a new layer."""
        with self._phase("overlay", "making the next disk layer"):
            for disk in self._lineage.disks:
                self._make_overlay(disk)
        with self._phase("state", "saving the device state"):
            state = await self._device_state()
        with self._phase("memory", "saving the memory"):
            image, pages = await self._memory(_copy)
        with self._phase("disk", "saving the disk"):
            stacks = self._stacks()
        with self._phase("seal", "sealing the disk"):
            await self._seal()
        kept = image if self._lineage.image else None
        sealed = [
            replace(disk, sealed=tuple(layer.path for layer in stack[len(disk.layers) :]))
            for disk, stack in zip(self._lineage.disks, stacks, strict=True)
        ]
        captured = self._result(state, image, pages, stacks)
        return captured, self._lineage.with_disks(sealed, image=kept)

    def _result(
        self, state: Path, image: MemoryImage, pages: int, stacks: Sequence[tuple[Layer, ...]]
    ) -> Capture:
        root, *written = stacks
        rest = iter(written)
        return Capture(
            device_state=state,
            memory=self._into / "memory",
            pages=pages,
            disk=root[-1],
            image=image,
            layers=root,
            drives=tuple(next(rest) if drive.writable else drive.layers for drive in self._spec.drives),
            seconds=self._seconds,
        )

    async def _device_state(self) -> Path:
        """Written to memory first: whether there is space for it is then not QEMU's to find out."""
        with ExitStack() as opened:
            held = os.memfd_create(f"device state of {self._spec.id}", os.MFD_CLOEXEC)
            opened.callback(os.close, held)
            # QEMU takes a descriptor of the very mode that it wants.
            given = os.open(f"/proc/self/fd/{held}", os.O_WRONLY | os.O_CLOEXEC)
            opened.callback(os.close, given)
            number = _new_set()
            await self._qmp.together(
                ("add-fd", {"fdset-id": number}, given),
                ("xen-save-devices-state", {"filename": f"/dev/fdset/{number}", "live": False}),
                ("remove-fd", {"fdset-id": number}),
                timeout=_STATE_LIMIT_S,
            )
            content = os.pread(held, os.fstat(held).st_size, 0)
        if not content.startswith(_STATE_MAGIC):
            raise HostFault(f"QEMU wrote {len(content)} bytes that are no device state")
        return self._file("state", lambda descriptor: _write(descriptor, content))

    async def _memory(self, take: Callable[[Path, Path], None]) -> tuple[MemoryImage, int]:
        """The memory's image, and how many pages the new layer of it has."""
        into = self._into / "memory"
        if self._lineage.image is None:
            await asyncio.to_thread(take, self._lineage.memory, into)
            self._undo.callback(into.unlink, missing_ok=True)
            status = into.stat()
            into.chmod(SHARED_MODE)
            os.chown(into, 0, 0)
            return MemoryImage(into), status.st_blocks * 512 // PAGE
        image, pages = await asyncio.to_thread(self._delta, self._lineage.image, into)
        self._undo.callback(into.unlink, missing_ok=True)
        self._undo.callback(map_of(into).unlink, missing_ok=True)
        return image, pages

    def _delta(self, image: MemoryImage, into: Path) -> tuple[MemoryImage, int]:
        below, opened = newest_usable(image, self._spec.memory_mib * MIB)
        with opened:
            captured = memory.capture(self._pid, opened, into)
        return MemoryImage(below.base, (*below.deltas, into)), captured.pages

    def _stacks(self) -> tuple[tuple[Layer, ...], ...]:
        """The layers of each disk: those below, and the live one, which becomes the capture's."""
        return tuple(self._stack(disk) for disk in self._lineage.disks)

    def _stack(self, disk: Disk) -> tuple[Layer, ...]:
        layers = list(disk.layers)
        for index, (own, path) in enumerate(disk.own()):
            if path == own or not path.exists():
                # Of a capture that was given up, or that a dead node did not finish.
                path = self._take(own, f"{disk.name}.{index}")
            layers.append(Layer(path, "qcow2"))
        return (*layers, Layer(self._take(disk.file(), disk.name), "qcow2"))

    def _take(self, own: Path, name: str) -> Path:
        path = self._into / name
        _share(own, path)
        self._undo.callback(path.unlink, missing_ok=True)
        return path

    def _make_overlay(self, disk: Disk) -> None:
        path = disk.file(1)
        size = self._spec.disk_mib if disk.drive is None else self._spec.drives[disk.drive].disk_mib
        with new_files() as create:
            overlay.write_empty(create(path), size * MIB)
        self._undo.callback(path.unlink, missing_ok=True)

    async def _seal(self) -> None:
        """Let the machine write to the new layers from now on: to all of them, or to none."""
        disks = self._lineage.disks
        with ExitStack() as opened:
            commands = [command for disk in disks for command in self._added(disk, opened)]
            actions = [
                {"type": "blockdev-snapshot", "data": {"node": disk.node(), "overlay": disk.node(1)}}
                for disk in disks
            ]
            try:
                # None can succeed where the one before did not.
                await self._qmp.together(
                    *commands, ("transaction", {"actions": actions}), timeout=_SEAL_LIMIT_S
                )
            except OutcomeUnknown:
                if await top_nodes(self._qmp, disks) != _nodes(disks, 1):
                    raise

    def _added(self, disk: Disk, opened: ExitStack) -> list[Command]:
        """What makes a disk's new layer known to QEMU."""
        number, node = _new_set(), disk.node(1)
        self._undo.push_async_callback(self._try, "remove-fd", {"fdset-id": number})
        self._undo.push_async_callback(self._try, "blockdev-del", {"node-name": node})
        # The second one is for the day when this layer is sealed.
        writing, reading = (os.open(disk.file(1), mode | os.O_CLOEXEC) for mode in (os.O_RDWR, os.O_RDONLY))
        opened.callback(os.close, writing)
        opened.callback(os.close, reading)
        return [
            ("add-fd", {"fdset-id": number}, writing),
            ("add-fd", {"fdset-id": number}, reading),
            ("blockdev-add", overlay_node(node, number)),
        ]

    async def _try(self, command: str, arguments: dict[str, object]) -> None:
        try:
            await self._qmp.execute(command, arguments)
        except HostFault as error:
            # What the capture failed of is the error to tell, and it may not have come this far.
            log.debug("machine %s: %s", self._spec.id, error)

    def _file(self, name: str, fill: Callable[[int], None]) -> Path:
        path = self._into / name
        with new_files() as create:
            fill(create(path))
        self._undo.callback(path.unlink, missing_ok=True)
        return path


def newest_usable(image: MemoryImage, size: int) -> tuple[MemoryImage, memory.Image]:
    """The image without those of its newest deltas that cannot be read any more.

    What a machine holds of its own is all that can differ from its base, so a capture may be made
    against any of the images between: it is only larger.

    Raises:
        StoreCorrupt: the base itself cannot be used.
    """
    for count in range(len(image.deltas), 0, -1):
        below = MemoryImage(image.base, image.deltas[:count])
        try:
            return below, memory.Image(below.base, below.deltas, size=size)
        except StoreCorrupt as error:
            log.warning("a memory layer cannot be built upon: %s", error)
    return MemoryImage(image.base), memory.Image(image.base, size=size)


def _share(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where that cannot be."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    with new_files() as create:
        memory.clone(source, create(target))


def _write(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
