"""Finds what new sandboxes are started from, with the images that they are made of or have beside.

Images are pulled and converted before there is a record, and held until there is one that names them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace

from agentenv.config import Settings
from agentenv.errors import InvalidRequest, NotFound, NotImplementedYet
from agentenv.image import source as image_source
from agentenv.image.cache import CachedImage
from agentenv.progress import Progress
from agentenv.sandbox import source
from agentenv.sandbox.drives import NewDrive, require_room
from agentenv.sandbox.parts import Images, Templates
from agentenv.sandbox.requests import NewSandbox, refuse_unsupported
from agentenv.sandbox.source import Source
from agentenv.snapshot.machine import stored
from agentenv.snapshot.records import Attached, DiskLayer
from agentenv.snapshot.store import Snapshots

log = logging.getLogger(__name__)


class Sources:
    """The sources of a node. Without `images` no image can be asked for."""

    def __init__(
        self, settings: Settings, templates: Templates, snapshots: Snapshots, images: Images | None
    ) -> None:
        self.templates = templates
        self._settings = settings
        self._snapshots = snapshots
        self._images = images

    @asynccontextmanager
    async def of(self, request: NewSandbox) -> AsyncIterator[Source]:
        """What a sandbox that is wanted is started from and is to have. Its images are held while the block
        runs: it puts them on record.

        Raises:
            InvalidRequest: it cannot be so, or there is no such image. NotFound: there is no such template.
            NotImplementedYet: it asks for what there is not. AenvError: an image cannot be had.
        """
        refuse_unsupported(request)
        with ExitStack() as held:
            if request.image is None:
                found = source.find(request.template, self.templates, self._snapshots)
                require_room(request.drives, found.drives)
                found = source.shaped(found, request.shape)
            else:
                require_room(request.drives)
                found = source.shaped(await self._of_image(request.image, held), request.shape)
            drives = await self._attached(request.drives, held) if request.drives else ()
            yield replace(found, drives=(*found.drives, *drives))

    async def _of_image(self, image: str, held: ExitStack) -> Source:
        (found,) = (await self._all([image], held)).values()
        settings = self._settings
        return source.of_template(
            source.image_template(image, found, vcpus=settings.vcpus, memory_mib=settings.memory_mib)
        )

    async def _attached(self, wanted: Sequence[NewDrive], held: ExitStack) -> tuple[Attached, ...]:
        found = await self._all({drive.image for drive in wanted}, held)
        return tuple(self._drive(drive, found[drive.image]) for drive in wanted)

    def _drive(self, wanted: NewDrive, image: CachedImage) -> Attached:
        size = wanted.disk_mib or image.disk_mib
        if size < image.disk_mib:
            raise InvalidRequest(
                f"drive {wanted.id!r}: diskSizeMB: {size} is less than the {image.disk_mib} of its image",
                remedy="a disk can only grow",
            )
        layer = DiskLayer(
            stored(self._snapshots.home, image.rootfs), image.rootfs.stat().st_size, format="raw"
        )
        return Attached(wanted.id, wanted.image, wanted.path, (layer,), size, wanted.read_only, wanted.part)

    async def _all(self, images: Iterable[str], held: ExitStack) -> dict[str, CachedImage]:
        """The root filesystems of images, held from now on; they are made side by side."""
        tasks = {image: asyncio.create_task(self._one(image), name=f"image {image}") for image in images}
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        found = {image: task.result() for image, task in tasks.items()}
        for each in found.values():
            assert self._images is not None
            held.callback(self._images.keep(each.digest).release)
        return found

    async def _one(self, image: str) -> CachedImage:
        if self._images is None:
            raise NotImplementedYet("this node has no cache of images")
        wanted = image if self._settings.build_from_paths else image_source.remote_only(image)
        try:
            return await self._images.get(wanted, progress=_log(image))
        except NotFound as error:  # which would be read as that there is no such template
            raise InvalidRequest(f"image {image}: {error.message}", remedy=error.remedy) from error


def _log(image: str) -> Progress:
    return lambda text: log.debug("image %s: %s", image, text)
