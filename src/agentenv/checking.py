"""A data directory against its records, beside a node that serves it or without one. All block."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from agentenv import run_record
from agentenv.config import Settings
from agentenv.errors import Conflict, StoreCorrupt, StoreFault
from agentenv.image.holds import is_alive
from agentenv.progress import Progress, silent
from agentenv.records.database import SCHEMA_VERSION, Database
from agentenv.records.ledger import Ledger
from agentenv.sandbox.records import Records
from agentenv.snapshot.records import ROOT
from agentenv.snapshot.store import Snapshots
from agentenv.template.create import KIND, reap
from agentenv.template.store import Templates


@dataclass(frozen=True)
class Finding:
    """Something that is wrong: a path relative to the data directory, and the snapshots, templates or
    sandboxes that it concerns. What is repairable belongs to nobody, and can be removed."""

    path: str
    what: str
    concerns: tuple[str, ...] = ()
    repairable: bool = False
    repaired: bool = False

    def document(self) -> dict[str, Any]:
        """It as a JSON object."""
        return {**asdict(self), "concerns": list(self.concerns)}


def examine(settings: Settings, *, digests: bool = False, progress: Progress = silent) -> tuple[Finding, ...]:
    """What is wrong; nothing is changed. With `digests` all files are read, about a second per GiB,
    of which `progress` is told.

    Raises:
        StoreFault: the records are another version's. StoreCorrupt: they cannot be read.
    """
    with _opened(settings) as database:
        found = _findings(settings, database, digests, progress)
        if found:  # a node that runs may have been between a file and its record
            again = set(_findings(settings, database, digests, progress))
            found = [each for each in found if each in again]
        return tuple(found)


def mend(settings: Settings, *, digests: bool = False, progress: Progress = silent) -> tuple[Finding, ...]:
    """As `examine`, and what can be repaired is.

    Raises:
        Conflict: a node serves the directory. StoreFault, StoreCorrupt: as `examine`; or something cannot be
            removed.
    """
    if (record := run_record.read(settings)) is not None:
        raise Conflict(f"process {record.pid} serves {settings.home}", remedy="aenv node stop")
    with run_record.hold(settings.home), _opened(settings) as database:
        found = _findings(settings, database, digests, progress)
        ledger = Ledger(database)
        reap(ledger, database)
        return tuple(_mended(settings, each) if each.repairable else each for each in found)


@contextmanager
def _opened(settings: Settings) -> Iterator[Database]:
    """The records, if they are whole and this version's: opening them would bring older ones up."""
    try:
        with closing(sqlite3.connect(f"{settings.database.as_uri()}?mode=ro", uri=True, timeout=10.0)) as raw:
            version = raw.execute("PRAGMA user_version").fetchone()[0]
            said = raw.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        raise StoreCorrupt(f"{settings.database} cannot be read: {error}") from error
    if version != SCHEMA_VERSION:
        raise StoreFault(
            f"{settings.database} has schema version {version}, this program has {SCHEMA_VERSION}",
            remedy="start a node of this version once, which brings older records up",
        )
    if said != "ok":
        raise StoreCorrupt(f"{settings.database} is damaged: {said}", remedy="restore it from a backup")
    database = Database(settings.database)
    try:
        yield database
    finally:
        database.close()


def _findings(settings: Settings, database: Database, digests: bool, progress: Progress) -> list[Finding]:
    snapshots = Snapshots(database, Ledger(database), settings.home)
    return [
        *_of_snapshots(snapshots, digests, progress),
        *_of_templates(settings, database),
        *_of_sandboxes(settings, database, snapshots),
        *_of_builds(database),
    ]


def _of_snapshots(snapshots: Snapshots, digests: bool, progress: Progress) -> Iterator[Finding]:
    for problem in snapshots.check(digests=digests, progress=progress):
        nobodys = not problem.snapshots and problem.path.startswith(f"{ROOT}/")
        yield Finding(problem.path, problem.what, problem.snapshots, repairable=nobodys)


def _of_templates(settings: Settings, database: Database) -> Iterator[Finding]:
    for named in Templates(database, settings).all():
        for build in named.builds:
            rootfs = None if build.made is None else build.made.rootfs
            if rootfs is not None and not rootfs.exists():
                path = rootfs.relative_to(settings.home) if rootfs.is_relative_to(settings.home) else rootfs
                yield Finding(str(path), "is missing", (f"template {named.name}",))


def _of_sandboxes(settings: Settings, database: Database, snapshots: Snapshots) -> Iterator[Finding]:
    for sandbox in Records(database).unended():  # one that has ended needs its snapshots no more
        if sandbox.snapshot is not None and snapshots.recorded(sandbox.snapshot) is None:
            what = f"has no snapshot {sandbox.snapshot}"
            yield Finding(settings.database.name, what, (f"sandbox {sandbox.id}",))


def _of_builds(database: Database) -> Iterator[Finding]:
    ledger = Ledger(database)
    for entry in ledger.entries(kind=KIND):
        if not is_alive(ledger, entry):
            yield Finding(entry.name, "was left by a build that ended", (entry.owner,), repairable=True)


def _mended(settings: Settings, found: Finding) -> Finding:
    """What belongs to nobody is removed, of builds by `reap` before."""
    if found.path.startswith(f"{ROOT}/"):
        path = settings.home / found.path
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreFault(f"{path} cannot be removed: {error.strerror}") from error
    return replace(found, repaired=True)
