"""A template's root filesystem as an OCI archive.

It is read inside of a machine of the template: what a guest wrote on its disk is parsed by a guest's kernel
and by nothing of the host, which takes what comes for bytes. The layer goes into a nameless file first, since
its digest stands before it in the archive; nothing is left of it when the archive is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO

from agentenv.building import programs
from agentenv.building.ground import Catalogue, used_bytes
from agentenv.building.workshop import Bench, Workshop
from agentenv.errors import GuestFault, StoreFull
from agentenv.image.config import INIT_LABEL, ImageConfig
from agentenv.image.layout import Frame, frame
from agentenv.image.tree import host_faults
from agentenv.network.slot import GATEWAY_ADDRESS
from agentenv.sandbox.admission import Admission, Need
from agentenv.sandbox.guest import Command, CommandFailed
from agentenv.sandbox.prepare import Prepared
from agentenv.snapshot.records import Snapshot
from agentenv.snapshot.store import Snapshots
from agentenv.template.records import Template
from agentenv.vmm.machine import Incompatible

CHUNK = 1 << 20
# How much is written between two looks at what the host has left.
LOOK_EVERY_BYTES = 64 << 20
# Times the disk that an archive may take: there is an inode per 16 KiB of disk, and a header has 1.5 KiB.
LIMIT_FACTOR = 2
_MESSAGE_BYTES = 4096


class Exported:
    """An archive of `size` bytes, to be closed: its layer takes room until then."""

    def __init__(self, around: Frame, layer: BinaryIO, size: int, release: Callable[[], None]) -> None:
        self._around = around
        self._layer = layer
        self._release = release
        self.size = len(around.head) + size + len(around.tail)

    async def body(self) -> AsyncIterator[bytes]:
        """The bytes of it, once. It is closed afterwards, or when nobody wants the rest."""
        try:
            yield self._around.head
            await asyncio.to_thread(self._layer.seek, 0)
            while data := await asyncio.to_thread(self._layer.read, CHUNK):
                yield data
            yield self._around.tail
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the layer. Repeatable."""
        self._layer.close()
        self._release()


class _Layer:
    """The layer as it comes, and the last words of the program that writes it."""

    def __init__(self, file: BinaryIO, limit: int, floor: int) -> None:
        self._file, self._limit, self._floor = file, limit, floor
        self._digest = hashlib.sha256()
        self.size = 0
        self.said = b""

    @property
    def digest(self) -> str:
        return f"sha256:{self._digest.hexdigest()}"

    def take(self, stream: str, data: bytes) -> None:
        """What the program writes.

        Raises:
            StoreFull: there is no room for it. GuestFault: it is more than the disk can hold.
        """
        if stream != "stdout":
            self.said = (self.said + data)[-_MESSAGE_BYTES:]
            return
        if self.size // LOOK_EVERY_BYTES != (self.size + len(data)) // LOOK_EVERY_BYTES:
            self._look()
        self.size += len(data)
        if self.size > self._limit:
            raise GuestFault("the guest says that it has more files than its disk can hold")
        self._digest.update(data)
        with host_faults("an export"):
            self._file.write(data)

    def _look(self) -> None:
        if shutil.disk_usage(self._file.fileno()).free < self._floor:
            raise StoreFull("no space left for an export", remedy="free space in the data directory")


class Exporter:
    """Exports templates.

    Args:
        directory: gives where nameless files are.
        floor_mib: MiB of its filesystem that stay free.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        prepared: Prepared,
        snapshots: Snapshots,
        workshop: Workshop,
        admission: Admission,
        directory: Callable[[], Path],
        *,
        floor_mib: int,
    ) -> None:
        self._catalogue = catalogue
        self._prepared = prepared
        self._snapshots = snapshots
        self._workshop = workshop
        self._admission = admission
        self._directory = directory
        self._floor = floor_mib << 20

    async def export(self, reference: str) -> Exported:
        """A template as its sandboxes find it, by id or name, with a tag or not. Of a cancelled
        call nothing is left.

        Raises:
            NotFound: there is no such template. CapacityExceeded: there is no room for the archive.
            StoreFull, GuestFault, HostFault, StoreFault: it could not be made.
        """
        template = self._catalogue.get(reference)
        snapshot = await self._prepared.of(template)
        owner = f"export-{secrets.token_hex(8)}"
        with contextlib.ExitStack() as undo:
            hold = self._snapshots.keep(snapshot)
            undo.callback(hold.release)
            used = used_bytes(self._snapshots.layers(snapshot))
            self._admission.reserve(owner, Need(disk_mib=-(-used >> 20)))
            release = partial(self._admission.release, owner)
            undo.callback(release)
            with host_faults(str(self._directory())):
                file = undo.enter_context(tempfile.TemporaryFile(dir=self._directory()))
            layer = _Layer(file, LIMIT_FACTOR * snapshot.resources.disk_mib << 20, self._floor)
            await self._read(snapshot, layer)
            with host_faults("an export"):
                file.flush()
            around = _frame(template, layer)
            exported = Exported(around, file, layer.size, release)
            undo.pop_all()
            hold.release()
            return exported

    async def _read(self, snapshot: Snapshot, layer: _Layer) -> None:
        async with AsyncExitStack() as stack:
            bench = await self._machine(snapshot, stack)
            arguments = (f"nameserver {GATEWAY_ADDRESS}\n",)
            command = Command(programs.argv("export", *arguments), "root", "/")
            try:
                await bench.guest.run(command, layer.take)
            except CommandFailed as error:
                said = layer.said.decode(errors="replace").strip().rpartition("\n")[2]
                raise GuestFault(f"the template cannot be exported: {said or error.message}") from error

    async def _machine(self, snapshot: Snapshot, stack: AsyncExitStack) -> Bench:
        try:
            return await stack.enter_async_context(self._workshop.restored(snapshot))
        except Incompatible:  # its memory is of another host; the disk will do
            layers = self._snapshots.layers(snapshot)
            return await stack.enter_async_context(self._workshop.booted(snapshot.resources, layers))


def _frame(template: Template, layer: _Layer) -> Frame:
    created = datetime.fromtimestamp(template.updated_at, UTC).isoformat(timespec="seconds")
    return frame(
        config_of(template),
        layer.digest,
        layer.size,
        created=created.replace("+00:00", "Z"),
        name="latest",
    )


def config_of(template: Template) -> ImageConfig:
    """How an image of a template is run: its start command, where it has one, is the image's."""
    config = template.image_config
    if template.start.command:
        config = replace(config, entrypoint=(), cmd=("/bin/sh", "-c", template.start.command))
    if template.init != config.init:
        config = replace(config, labels={**config.labels, INIT_LABEL: template.init})
    return config


def file_name(reference: str) -> str:
    """What the archive of a template is called: its name without what cannot be in one."""
    name = reference.rpartition("/")[2]
    return "".join(each if each.isascii() and (each.isalnum() or each in "-_.") else "-" for each in name)
