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
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentenv.errors import Conflict, HostFault, OutcomeUnknown, StoreCorrupt
from agentenv.vmm import memory
from agentenv.vmm.machine import Capture, Layer, MachineSpec, MemoryImage
from agentenv.vmm.qemu import overlay
from agentenv.vmm.qemu.command import live_node, overlay_node
from agentenv.vmm.qemu.lineage import Lineage, disk_file
from agentenv.vmm.qemu.qmp import Qmp
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
    if _top(blocks) != live_node(lineage.depth):
        # QEMU may have finished what it did not answer in time: a capture would miss what was written.
        raise HostFault(f"machine {spec.id} writes to another disk layer than the last one known of it")
    async with AsyncExitStack() as undo:
        work = _Capture(spec, pid, qmp, lineage, into, steps, undo)
        captured = await (work.final() if final else work.going_on())
        undo.pop_all()
    return captured


async def top_node(qmp: Qmp) -> str:
    """The block node that the machine's root disk is written to."""
    return _top(await qmp.execute("query-block"))


def _top(blocks: list[dict[str, Any]]) -> str:
    for block in blocks:
        if "drive-root" in block.get("qdev", ""):
            return str(block["inserted"]["node-name"])
    raise HostFault("QEMU knows of no root disk")


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
            below, disk = self._disk()
        return self._result(state, image, pages, below, disk), self._lineage

    async def going_on(self) -> tuple[Capture, Lineage]:
        """Of a machine that goes on, in a new layer."""
        with self._phase("overlay", "making the next disk layer"):
            overlay_file = self._new_overlay()
        with self._phase("state", "saving the device state"):
            state = await self._device_state()
        with self._phase("memory", "saving the memory"):
            image, pages = await self._memory(_copy)
        with self._phase("disk", "saving the disk"):
            below, disk = self._disk()
        with self._phase("seal", "sealing the disk"):
            await self._seal(overlay_file)
        captured = self._result(state, image, pages, below, disk)
        sealed = tuple(layer.path for layer in captured.layers[len(self._spec.layers) :])
        kept = image if self._lineage.image else None
        return captured, replace(self._lineage, sealed=sealed, image=kept)

    def _result(
        self, state: Path, image: MemoryImage, pages: int, below: tuple[Layer, ...], disk: Layer
    ) -> Capture:
        return Capture(
            device_state=state,
            memory=self._into / "memory",
            pages=pages,
            disk=disk,
            image=image,
            layers=(*below, disk),
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

    def _disk(self) -> tuple[tuple[Layer, ...], Layer]:
        """The layers below, and the live one, which becomes the capture's."""
        lineage = self._lineage
        below = list(self._spec.layers)
        for index, path in enumerate(lineage.sealed):
            own = disk_file(lineage.directory, len(lineage.layers) + index)
            if path == own or not path.exists():
                # Of a capture that was given up, or that a dead node did not finish.
                path = self._take(own, f"disk.{index}")
            below.append(Layer(path, "qcow2"))
        return tuple(below), Layer(self._take(lineage.disk, "disk"), "qcow2")

    def _take(self, own: Path, name: str) -> Path:
        path = self._into / name
        _share(own, path)
        self._undo.callback(path.unlink, missing_ok=True)
        return path

    def _new_overlay(self) -> Path:
        lineage = self._lineage
        path = disk_file(lineage.directory, lineage.depth + 1)
        with new_files() as create:
            overlay.write_empty(create(path), self._spec.disk_mib * MIB)
        self._undo.callback(path.unlink, missing_ok=True)
        return path

    async def _seal(self, overlay_file: Path) -> None:
        """Let the machine write to the new layer from now on."""
        depth, number = self._lineage.depth, _new_set()
        self._undo.push_async_callback(self._try, "remove-fd", {"fdset-id": number})
        self._undo.push_async_callback(self._try, "blockdev-del", {"node-name": live_node(depth + 1)})
        with ExitStack() as opened:
            # The second one is for the day when this layer is sealed.
            writing = os.open(overlay_file, os.O_RDWR | os.O_CLOEXEC)
            opened.callback(os.close, writing)
            reading = os.open(overlay_file, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, reading)
            try:
                # None can succeed where the one before did not.
                await self._qmp.together(
                    ("add-fd", {"fdset-id": number}, writing),
                    ("add-fd", {"fdset-id": number}, reading),
                    ("blockdev-add", overlay_node(depth + 1, number)),
                    ("blockdev-snapshot", {"node": live_node(depth), "overlay": live_node(depth + 1)}),
                    timeout=_SEAL_LIMIT_S,
                )
            except OutcomeUnknown:
                if await top_node(self._qmp) != live_node(depth + 1):
                    raise

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
