"""Images from this host's files, made once per source: what there is while nothing pulls from registries."""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from agentenv.config import Settings
from agentenv.errors import NotImplementedYet
from agentenv.image.build import build_rootfs
from agentenv.image.cache import CachedImage, Hold
from agentenv.image.credentials import Credentials
from agentenv.records.ledger import Ledger
from agentenv.run_record import start_time
from agentenv.template import base
from agentenv.template.create import GROWN_MIB_MAX, KIND, recipe_of

_PREFIXES = ("oci:", "archive:", "rootfs:")


class Free(Hold):
    """Nothing here is ever evicted."""

    def release(self) -> None:
        """See Hold."""


class LocalImages:
    """See image.cache.Images, of which this does the part that needs no registry."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._settings = settings
        self._ledger = ledger
        self._made: dict[str, CachedImage] = {}
        self._lock = asyncio.Lock()

    async def get(
        self,
        source: str,
        *,
        credentials: Credentials | None = None,
        disk_mib: int | None = None,
        progress: Callable[[str], None],
    ) -> CachedImage:
        """See Images.get."""
        if not source.startswith(_PREFIXES):
            raise NotImplementedYet(f"{source}: pulling images is not part of this version yet")
        disk_mib = disk_mib or self._settings.disk_mib
        recipe = recipe_of(source, disk_mib, base.SYSTEM) or uuid.uuid4().hex
        async with self._lock:
            if (known := self._made.get(recipe)) is None:
                known = self._made[recipe] = await self._make(source, recipe, disk_mib, progress)
        return known

    async def _make(
        self, source: str, recipe: str, disk_mib: int, progress: Callable[[str], None]
    ) -> CachedImage:
        name = hashlib.sha256(f"{recipe} {uuid.uuid4()}".encode()).hexdigest()[:20]
        scratch = self._settings.images_dir / f".build-{name}"
        rootfs = self._settings.images_dir / f"image-{name}.ext4"
        entry = self._ledger.record(
            name, KIND, str(scratch), tree=str(scratch / "tree"), rootfs=str(rootfs), pid=os.getpid(),
            started=start_time(os.getpid()),
        )  # fmt: skip
        try:
            built = await build_rootfs(
                source,
                rootfs,
                disk_mib=disk_mib,
                max_disk_mib=max(disk_mib, GROWN_MIB_MAX),
                scratch=scratch,
                progress=progress,
                tree=scratch / "tree",
            )
        finally:
            Path(entry.name).rmdir()
            self._ledger.strike(entry)
        return CachedImage(
            built.digest,
            rootfs,
            built.disk_mib,
            built.size_bytes,
            built.config,
            built.default_user,
            built.default_workdir,
        )

    def keep(self, digest: str) -> Hold:
        """See Images.keep."""
        return Free()
