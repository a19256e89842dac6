"""Creates templates: builds the root filesystem aside, then puts file and record in place.

Everything under construction is in one directory per build, written down in the ledger with
the process that builds, so that `reap` removes what a dead one left and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agentenv.config import Settings
from agentenv.errors import InvalidRequest
from agentenv.image.bootstrap import System
from agentenv.image.build import BuiltImage, build_rootfs
from agentenv.image.source import Bootstrap, parse
from agentenv.image.tree import host_faults, remove_scratch
from agentenv.proc import start_time
from agentenv.records.database import Database
from agentenv.records.ledger import Entry, Ledger
from agentenv.template import base, workspace
from agentenv.template.store import Template, Templates, check_name, new_id

KIND = "template-build"
DISK_MIB_MAX = 1 << 20
GROWN_MIB_MAX = 65536  # how far a disk of unstated size grows for its image
MEMORY_MIB_MAX = 1 << 20
VCPUS_MAX = 64

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
    progress: Callable[[str], None],
    system: System = base.SYSTEM,
) -> Template:
    """Make a template from a SOURCE, in the place of one of the same name.

    What is asked for already being there, it is returned as it is, unless `force` is given. Without
    `disk_mib` the node's default is taken, or as much more as the image needs.

    Raises:
        InvalidRequest, NotFound, StoreCorrupt, StoreFull, HostFault: see `build_rootfs`.
    """
    check_name(name)
    vcpus = _within("vcpus", vcpus or settings.vcpus, 1, VCPUS_MAX)
    memory_mib = _within("memory", memory_mib or settings.memory_mib, 128, MEMORY_MIB_MAX)
    wanted_mib = _within("disk", disk_mib or settings.disk_mib, 64, DISK_MIB_MAX)
    templates = Templates(database, settings)
    recipe = recipe_of(source, wanted_mib, system)
    before = templates.find(name)
    if before and not force and recipe is not None and before.recipe == recipe and before.rootfs.is_file():
        return _resized(templates, before, vcpus, memory_mib, progress)
    now = time.time()
    build_id = str(uuid.uuid4())
    rootfs = settings.images_dir / f"{name}-{build_id}.ext4"
    with host_faults(str(settings.images_dir)):
        settings.images_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
    entry = _begin(ledger, settings, source, build_id, rootfs)
    try:
        built = await build_rootfs(
            source,
            Path(entry.name) / "rootfs.ext4",
            disk_mib=wanted_mib,
            max_disk_mib=disk_mib or max(wanted_mib, GROWN_MIB_MAX),
            scratch=Path(entry.name),
            progress=progress,
            system=system,
            tree=Path(entry.detail["tree"]),
        )
        with host_faults(str(rootfs)):
            built.path.rename(rootfs)
            _sync_directory(rootfs.parent)
        template = templates.register(
            _template(built, name, build_id, rootfs, source, recipe or built.digest, vcpus, memory_mib, now)
        )
    except BaseException:
        rootfs.unlink(missing_ok=True)
        raise
    finally:
        _end(ledger, entry)  # little is left there: the tree is gone already
    templates.sweep()
    return template


def _within(what: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise InvalidRequest(f"{what} of {value} is not possible", remedy=f"between {least} and {most}")
    return value


def recipe_of(source: str, disk_mib: int, system: System) -> str | None:
    """A name for what a request makes, where that can be told without reading it all.

    Packages: suite and definition (a newer state of the mirror does not count). An image or tarball:
    path, size and times of the file, or of a layout's index. A directory: None, never the same.
    """
    wanted = parse(source, os.path.lexists)
    if isinstance(wanted, Bootstrap):
        parts = f"{wanted.suite} {system.identity}"
    else:
        path = wanted.path.resolve()
        telling = path / "index.json" if path.is_dir() else path
        if not telling.is_file():
            return None
        status = telling.stat()
        which = f"{wanted.kind} {wanted.tag} {wanted.digest}"
        parts = f"{path} {status.st_ino} {status.st_size} {status.st_mtime_ns} {which}"
    return hashlib.sha256(f"{FORMAT} {disk_mib} {parts}".encode()).hexdigest()


def _resized(
    templates: Templates, before: Template, vcpus: int, memory_mib: int, progress: Callable[[str], None]
) -> Template:
    """The template as it is, or with other numbers over the same filesystem."""
    if (before.vcpus, before.memory_mib) == (vcpus, memory_mib):
        progress(f"{before.name} is up to date")
        return before
    changed = replace(
        before, vcpus=vcpus, memory_mib=memory_mib, build_id=str(uuid.uuid4()), updated_at=time.time()
    )
    return templates.register(changed)


def _template(
    built: BuiltImage,
    name: str,
    build_id: str,
    rootfs: Path,
    source: str,
    recipe: str,
    vcpus: int,
    memory_mib: int,
    now: float,
) -> Template:
    return Template(
        id=new_id(),
        name=name,
        build_id=build_id,
        rootfs=rootfs,
        disk_mib=built.disk_mib,
        memory_mib=memory_mib,
        vcpus=vcpus,
        source=source,
        recipe=recipe,
        digest=built.digest,
        size_bytes=built.size_bytes,
        default_user=built.default_user,
        default_workdir=built.default_workdir,
        created_at=now,
        updated_at=time.time(),
        env=dict(built.config.env),
        entrypoint=built.config.entrypoint,
        cmd=built.config.cmd,
    )


def _begin(ledger: Ledger, settings: Settings, source: str, build_id: str, rootfs: Path) -> Entry:
    scratch = settings.images_dir / f".build-{build_id}"
    bootstraps = isinstance(parse(source, os.path.lexists), Bootstrap)
    above = scratch if not bootstraps else workspace.in_memory(build_id) or scratch
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


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reap(ledger: Ledger, database: Database) -> list[str]:
    """Remove what builds of dead processes left; returns their build ids. A build that runs is kept."""
    reaped = []
    known = {
        Path(row["rootfs"]) for row in database.query("SELECT document ->> 'rootfs' AS rootfs FROM templates")
    }
    for entry in ledger.entries(kind=KIND):
        alive = (
            entry.boot_id == ledger.boot_id
            and start_time(entry.detail["pid"], zombie=False) == entry.detail["started"]
        )
        if alive:
            continue
        _remove_workspaces(entry)
        if (rootfs := Path(entry.detail["rootfs"])) not in known:
            rootfs.unlink(missing_ok=True)
        ledger.strike(entry)
        reaped.append(entry.owner)
    return reaped
