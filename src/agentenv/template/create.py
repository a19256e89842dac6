"""Creates templates: over a root filesystem of the image cache, or over a system installed from packages.

A system under construction is in one directory per build, written down in the ledger with the process that
builds, so that `reap` removes what a dead one left and nothing else. Images are the cache's.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from agentenv.config import Settings
from agentenv.image.bootstrap import System
from agentenv.image.build import BuiltImage, build_rootfs
from agentenv.image.cache import CachedImage, Credentials, Images
from agentenv.image.cache import reap as reap_images
from agentenv.image.entries import GROWN_MIB_MAX, sync_directory
from agentenv.image.holds import is_alive
from agentenv.image.source import Bootstrap, parse
from agentenv.image.tree import host_faults, remove_scratch
from agentenv.proc import start_time
from agentenv.progress import Progress
from agentenv.records.database import Database
from agentenv.records.ledger import Entry, Ledger
from agentenv.snapshot.records import Init
from agentenv.template import base, workspace
from agentenv.template.records import Template
from agentenv.template.sizes import (
    DISK_MIB_MAX,
    DISK_MIB_MIN,
    MEMORY_MIB_MAX,
    MEMORY_MIB_MIN,
    VCPUS_MAX,
    within,
)
from agentenv.template.store import Templates, check_name, new_id

KIND = "template-build"

# Part of every recipe: raise it when the same source makes another filesystem than before.
FORMAT = 1


async def create(
    settings: Settings,
    database: Database,
    ledger: Ledger,
    name: str,
    source: str,
    *,
    vcpus: int | None = None,
    memory_mib: int | None = None,
    disk_mib: int | None = None,
    force: bool = False,
    init: Init | None = None,
    credentials: Credentials | None = None,
    progress: Progress,
    system: System = base.SYSTEM,
) -> Template:
    """Make a template from a SOURCE, in the place of one of the same name.

    What is asked for already being there, it is returned as it is, unless `force` is given: that makes
    another build of it, although an image's filesystem is the same. Without `disk_mib` the node's default is
    taken, or as much more as the image needs; without `init` the image says what process 1 is.
    `credentials` are for the registry, this time only.

    Raises:
        InvalidRequest, NotFound, Forbidden, Unreachable, StoreCorrupt, StoreFull, HostFault: see
            `build_rootfs`.
    """
    check_name(name)
    shape = Shape(
        within("vcpus", vcpus or settings.vcpus, 1, VCPUS_MAX),
        within("memory", memory_mib or settings.memory_mib, MEMORY_MIB_MIN, MEMORY_MIB_MAX),
    )
    wanted_mib = within("disk", disk_mib or settings.disk_mib, DISK_MIB_MIN, DISK_MIB_MAX)
    creation = _Creation(settings, database, ledger, name, source, shape, force, init, progress)
    if isinstance(parse(source, os.path.lexists), Bootstrap):
        template = await creation.from_packages(
            system, wanted_mib, disk_mib or max(wanted_mib, GROWN_MIB_MAX)
        )
    else:
        template = await creation.from_image(disk_mib, credentials)
    creation.templates.sweep()
    return template


def _is_there(template: Template) -> bool:
    return template.rootfs is not None and template.rootfs.is_file()


@dataclass(frozen=True)
class Shape:
    """What a template's machines have."""

    vcpus: int
    memory_mib: int


class _Creation:
    def __init__(
        self,
        settings: Settings,
        database: Database,
        ledger: Ledger,
        name: str,
        source: str,
        shape: Shape,
        force: bool,
        init: Init | None,
        progress: Progress,
    ) -> None:
        self.settings, self.database, self.ledger = settings, database, ledger
        self.name, self.source, self.shape, self.force = name, source, shape, force
        self.progress, self.init = progress, init
        self.templates = Templates(database, settings)
        self.begun = time.time()

    async def from_image(self, disk_mib: int | None, credentials: Credentials | None) -> Template:
        """A template over a root filesystem in the cache, which it shares with others of the same content."""
        images = Images(self.settings, self.database, self.ledger)
        try:
            image = await images.get(
                self.source, credentials=credentials, disk_mib=disk_mib, progress=self.progress
            )
            before = self.templates.find(self.name)
            if before and not self.force and before.rootfs == image.rootfs:
                return self._resized(before)
            recipe = f"{image.digest} {image.disk_mib}"
            return self._register(image, str(uuid.uuid4()), image.rootfs, recipe)
        finally:
            await images.close()

    async def from_packages(self, system: System, disk_mib: int, max_disk_mib: int) -> Template:
        """A template over a system of its own, installed from the mirror."""
        recipe = recipe_of(self.source, disk_mib, system)
        before = self.templates.find(self.name)
        if before and not self.force and before.recipe == recipe and _is_there(before):
            return self._resized(before)
        build_id = str(uuid.uuid4())
        rootfs = self.settings.images_dir / f"{self.name.replace('/', '_')}-{build_id}.ext4"
        with host_faults(str(self.settings.images_dir)):
            self.settings.images_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        entry = _begin(self.ledger, self.settings, build_id, rootfs)
        try:
            built = await build_rootfs(
                self.source,
                Path(entry.name) / "rootfs.ext4",
                disk_mib=disk_mib,
                max_disk_mib=max_disk_mib,
                scratch=Path(entry.name),
                progress=self.progress,
                system=system,
                tree=Path(entry.detail["tree"]),
            )
            with host_faults(str(rootfs)):
                built.path.rename(rootfs)
                sync_directory(rootfs.parent)
            return self._register(built, build_id, rootfs, recipe)
        except BaseException:
            rootfs.unlink(missing_ok=True)
            raise
        finally:
            _end(self.ledger, entry)  # little is left there: the tree is gone already

    def _resized(self, before: Template) -> Template:
        """The template as it is, or with other numbers over the same filesystem."""
        init = self.init or before.init
        if (before.vcpus, before.memory_mib, before.init) == (*astuple(self.shape), init):
            self.progress(f"{before.name} is up to date")
            if before.source != self.source:  # another name of the same content
                return self.templates.register(replace(before, source=self.source))
            return before
        now, build_id = time.time(), str(uuid.uuid4())
        return self.templates.register(
            replace(before, **vars(self.shape), init=init, build_id=build_id, updated_at=now)
        )

    def _register(
        self, built: BuiltImage | CachedImage, build_id: str, rootfs: Path, recipe: str
    ) -> Template:
        return self.templates.register(
            Template(
                id=new_id(),
                name=self.name,
                build_id=build_id,
                rootfs=rootfs,
                disk_mib=built.disk_mib,
                memory_mib=self.shape.memory_mib,
                vcpus=self.shape.vcpus,
                source=self.source,
                recipe=recipe,
                digest=built.digest,
                size_bytes=built.size_bytes,
                default_user=built.default_user,
                default_workdir=built.default_workdir,
                created_at=self.begun,
                updated_at=time.time(),
                env=dict(built.config.env),
                entrypoint=built.config.entrypoint,
                cmd=built.config.cmd,
                labels=dict(built.config.labels),
                exposed_ports=built.config.exposed_ports,
                init=self.init or built.config.init,
            )
        )


def recipe_of(source: str, disk_mib: int, system: System) -> str:
    """A name for what a request for packages makes: suite and definition. A newer state of the mirror does
    not count."""
    suite = source.partition(":")[2]
    return hashlib.sha256(f"{FORMAT} {disk_mib} {suite} {system.identity}".encode()).hexdigest()


def _begin(ledger: Ledger, settings: Settings, build_id: str, rootfs: Path) -> Entry:
    scratch = settings.images_dir / f".build-{build_id}"
    above = workspace.in_memory(build_id) or scratch
    return ledger.record(
        build_id,
        KIND,
        str(scratch),
        tree=str(above / "tree"),
        rootfs=str(rootfs),
        pid=os.getpid(),
        started=start_time(os.getpid()),
    )


def _end(ledger: Ledger, entry: Entry) -> None:
    _remove_workspaces(entry)
    ledger.strike(entry)


def _remove_workspaces(entry: Entry) -> None:
    remove_scratch(Path(entry.detail["tree"]).parent)
    remove_scratch(Path(entry.name))


def reap(ledger: Ledger, database: Database) -> list[str]:
    """Remove what builds of dead processes left; returns their build ids. A build that runs is kept."""
    reap_images(ledger)
    reaped = []
    known = {
        Path(row["rootfs"])
        for row in database.query(
            "SELECT document ->> '$.made.rootfs' AS rootfs FROM builds"
            " WHERE document ->> '$.made.rootfs' IS NOT NULL"
        )
    }
    for entry in ledger.entries(kind=KIND):
        if is_alive(ledger, entry):
            continue
        _remove_workspaces(entry)
        if (rootfs := Path(entry.detail["rootfs"])) not in known:
            rootfs.unlink(missing_ok=True)
        ledger.strike(entry)
        reaped.append(entry.owner)
    return reaped
