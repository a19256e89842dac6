"""An image of a registry while it arrives: its layers can be opened at once, and are waited for.

The lowest layers come first, a few at a time, so that unpacking one goes on while others are on their way.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from agentenv.errors import StoreFull
from agentenv.image import oci
from agentenv.image.blobs import BlobStore
from agentenv.image.config import ImageConfig
from agentenv.image.container import Image, ImageLayer
from agentenv.image.credentials import Credentials
from agentenv.image.oci import Descriptor, Manifest
from agentenv.image.registry.access import Access
from agentenv.progress import Progress, Tally

if TYPE_CHECKING:
    from agentenv.image.registry.pull import Puller


@dataclass(frozen=True)
class Registries:
    """How images of registries are got: settings, the store for what comes, and who asks."""

    access: Access
    blobs: BlobStore
    credentials: Credentials | None = None


class Arriving:
    """The layers of one image, of which some may still have to come."""

    def __init__(
        self, puller: Puller, blobs: BlobStore, manifest: Manifest, config: Mapping[str, Any]
    ) -> None:
        self._puller, self._blobs = puller, blobs
        self._layers = {layer.digest: layer for layer in manifest.layers}
        self._there: dict[str, Future[None]] = {digest: Future() for digest in self._layers}
        self.found = tuple(digest for digest in self._layers if blobs.has(digest))
        ids = oci.diff_ids(config, len(manifest.layers))
        self.image = Image(
            manifest.config.digest,
            ImageConfig.from_image(config),
            tuple(
                ImageLayer(layer.digest, self._opener(layer.digest), diff_id, layer.size)
                for layer, diff_id in zip(manifest.layers, ids, strict=True)
            ),
        )

    def _opener(self, digest: str) -> Callable[[], IO[bytes]]:
        def open_it() -> IO[bytes]:
            self._there[digest].result()
            return self._blobs.open(digest)

        return open_it

    def give_up(self) -> None:
        """Let those end who wait for layers."""
        for future in self._there.values():
            future.cancel()

    async def fetch(self, at_once: int, progress: Progress) -> None:
        """Get what is missing. When that fails, those who wait for a layer get the error too.

        Raises:
            NotFound, Forbidden, Unreachable, StoreCorrupt, StoreFull: see `Puller.fetch`.
        """
        for digest in self.found:
            self._there[digest].set_result(None)
        missing = [layer for digest, layer in self._layers.items() if digest not in self.found]
        try:
            await self._fetch(missing, at_once, progress)
        except Exception as error:  # those who wait raise it as well
            for future in self._there.values():
                if not future.done():
                    future.set_exception(error)
            raise

    async def _fetch(self, missing: list[Descriptor], at_once: int, progress: Progress) -> None:
        total = sum(layer.size for layer in missing)
        self._check_room(total)
        turns = asyncio.Semaphore(at_once)
        tell = Tally("fetching", total, progress).add

        async def one(layer: Descriptor) -> None:
            async with turns:
                await self._puller.fetch(layer, tell)
                self._there[layer.digest].set_result(None)

        try:
            async with asyncio.TaskGroup() as group:
                for layer in missing:
                    group.create_task(one(layer))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _check_room(self, size: int) -> None:
        """Raises StoreFull before anything is written that cannot fit."""
        place = self._blobs.directory
        while not place.exists():
            place = place.parent
        status = os.statvfs(place)
        if size > (free := status.f_bavail * status.f_frsize):
            raise StoreFull(
                f"the layers to fetch take {size >> 20} MiB, and {free >> 20} are free in {place}",
                remedy="free space in the data directory",
            )


async def open_remote(puller: Puller, blobs: BlobStore) -> Arriving:
    """What a reference means now, its configuration read; nothing of its layers is fetched yet.

    Raises:
        NotFound, Forbidden, Unreachable, InvalidRequest, StoreCorrupt: see `Puller.resolve`.
    """
    manifest = await puller.resolve()
    await puller.fetch(manifest.config, lambda size: None)
    config = oci.read_document(blobs, manifest.config)
    oci.check_platform(config)
    return Arriving(puller, blobs, manifest, config)
