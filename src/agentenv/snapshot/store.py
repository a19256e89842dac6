"""The snapshots of a node: made whole or not at all, found, deleted, and cleared away when unneeded.

Methods are called on the event loop's thread, which also owns the database; those that are coroutines
do their file work in a thread and are finished even when their caller is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from agentenv.errors import InvalidRequest, NotFound, StoreCorrupt, StoreFault
from agentenv.progress import Progress, silent
from agentenv.records.database import Database
from agentenv.records.ledger import Entry, Ledger
from agentenv.snapshot import collection, files, lineage, listing, machine
from agentenv.snapshot.collection import Garbage
from agentenv.snapshot.draft import Draft
from agentenv.snapshot.fsck import Problem, examine, file_problem, stray
from agentenv.snapshot.holds import Hold, Holds
from agentenv.snapshot.lineage import Branch, Lineage
from agentenv.snapshot.listing import Page, Query
from agentenv.snapshot.machine import Contents
from agentenv.snapshot.names import canonical
from agentenv.snapshot.records import (
    ROOT,
    Attached,
    Resources,
    Snapshot,
    StoredFile,
    new_snapshot_id,
)
from agentenv.snapshot.table import Table
from agentenv.vmm.machine import Capture, Drive, Layer, SavedState
from agentenv.vmm.settle import settled
from agentenv.vmm.stored import unwritable

log = logging.getLogger(__name__)

KIND = "snapshot"


class Snapshots:
    """The snapshots in `home`, the node's data directory."""

    def __init__(self, database: Database, ledger: Ledger, home: Path) -> None:
        self._table = Table(database)
        self._ledger = ledger
        self._home = home
        self._root = home / ROOT
        self._holds = Holds()
        self._given_up: list[Entry] = []

    @property
    def home(self) -> Path:
        """The node's data directory, below which all files of snapshots lie."""
        return self._home

    # Making

    def begin(self, owner: str) -> Draft:
        """A draft with a new id and an empty directory; `owner` is the sandbox or template it is of. The
        directory has its lasting name, as a machine remembers where its captures went; what makes it a
        snapshot is the record.

        Raises:
            StoreFull, StoreFault: the directory cannot be made.
        """
        snapshot_id = new_snapshot_id()
        path = self._root / snapshot_id
        entry = self._ledger.record(owner, KIND, snapshot_id)
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            path.mkdir(mode=0o700)
        except OSError as error:
            self._ledger.strike(entry)
            raise unwritable(path, error) from error
        return Draft(snapshot_id, path, entry)

    async def publish(self, draft: Draft, record: Snapshot, *, durable: bool = False) -> Snapshot:
        """Make a filled draft a snapshot: from here on it survives the death of the node, and with
        `durable` that of the host as well. Names in the record must be canonical; one that another
        snapshot has comes over. When it fails, nothing is left.

        Raises:
            Conflict: a template has one of the names. StoreFull, StoreFault: it cannot be written.
        """
        return await settled(self._publish(draft, replace(record, id=draft.id, durable=durable)))

    async def _publish(self, draft: Draft, record: Snapshot) -> Snapshot:
        try:
            if record.durable:
                paths = [*self._unsynced(record), *files.whole(draft.path), self._root]
                await asyncio.to_thread(files.sync, paths)
            self._table.insert(record, draft.entry.id)
        except BaseException:
            await self._give_up(draft.entry)
            raise
        if record.durable:
            try:
                self._table.sync()
            except StoreFault:
                await self._unmake(record)  # what is not as durable as was asked is not there
                raise
        return record

    async def _unmake(self, record: Snapshot) -> None:
        """Leave nothing of a snapshot that nobody has seen: a machine that was captured to end may go on when
        the files that it shares with the capture are gone."""
        self._table.delete(record.id, time.time())
        await asyncio.to_thread(files.remove, self._root / record.id)
        self._table.drop((record.id,))

    def _unsynced(self, record: Snapshot) -> list[Path]:
        """Files and directories of other snapshots that a durable one rests on and that were not synced
        themselves: pauses and fork points."""
        owners = {path.split("/")[1] for path in record.parts() if path.startswith(f"{ROOT}/")}
        soft = {id for id in owners - {record.id} if (owner := self._table.get(id)) and not owner.durable}
        paths = [path for path in sorted(record.parts()) if path.split("/")[1] in soft]
        return [self._home / path for path in paths] + [self._root / id for id in sorted(soft)]

    async def abandon(self, draft: Draft) -> None:
        """Give a draft up; repeatable, and without effect on one that was published. Its files are gone
        then, though a full disk may keep its entry in the ledger from being struck before `collect`.

        Raises:
            StoreFault: a file cannot be removed.
        """
        await settled(self._give_up(draft.entry))

    async def _give_up(self, entry: Entry) -> None:
        try:
            await self._clear(entry)
        except StoreFault as error:
            if (self._root / entry.name).exists():
                raise
            log.warning("the draft %s is gone, and not struck from the ledger yet: %s", entry.name, error)
            self._given_up.append(entry)

    async def _clear(self, entry: Entry) -> None:
        if self._table.get(entry.name) is None:
            await asyncio.to_thread(files.remove, self._root / entry.name)
        self._ledger.strike(entry)

    async def reap(self) -> tuple[str, ...]:
        """Remove what an earlier life of the node left unfinished; returns the ids. Before any draft."""
        entries = self._ledger.entries(kind=KIND)
        for entry in entries:
            await self._clear(entry)
        return tuple(entry.name for entry in entries)

    # Changing

    def update(self, record: Snapshot) -> Snapshot:
        """Replace a record, as when its memory was folded. The layers before go with `collect`.

        Raises:
            StoreFault: it is gone.
        """
        self._table.update(record)
        return record

    async def make_durable(self, snapshot_id: str) -> Snapshot:
        """Sync a snapshot to the disk, and say so in its record.

        Raises:
            NotFound: it is gone. StoreFull, StoreFault: it cannot be written.
        """
        return await settled(self._make_durable(snapshot_id))

    async def _make_durable(self, snapshot_id: str) -> Snapshot:
        with self.hold(snapshot_id) as record:
            paths = [*self._unsynced(record), *(self._home / path for path in sorted(record.own_parts()))]
            await asyncio.to_thread(files.sync, [*paths, self._root / record.id, self._root])
            made = self.update(replace(self.get(record.id), durable=True))
            self._table.sync()
        return made

    def delete(self, snapshot_id: str) -> bool:
        """Delete a snapshot: it is not found any more, and its names are free. Layers that others
        refer to stay until `collect` finds that nobody does. False when there was none."""
        return self._table.delete(snapshot_id, time.time())

    # Finding

    def find(self, name_or_id: str) -> Snapshot | None:
        """The snapshot of an id (also `ID:default`) or a name; without a tag it is `default`."""
        try:
            name = canonical(name_or_id)
        except InvalidRequest:
            return None
        for snapshot_id in {name_or_id, name.removesuffix(":default")}:
            record = self._table.get(snapshot_id)
            if record is not None and record.deleted_at is None:
                return record
        return self._table.named(name)

    def get(self, name_or_id: str) -> Snapshot:
        """The same, or raise NotFound."""
        found = self.find(name_or_id)
        if found is None:
            raise NotFound(f'snapshot "{name_or_id}" not found', remedy="GET /snapshots lists them")
        return found

    def of_build(self, build_id: str, resources: Resources | None = None) -> Snapshot | None:
        """The first snapshot of a template's build, for machines of that size where it is said: what its
        sandboxes start from."""
        return self._table.first_of_build(build_id, resources)

    def list(self, query: Query) -> Page:
        """A page of snapshots, newest first.

        Raises:
            InvalidRequest: the page's token is none.
        """
        return listing.select(self._table.all(), query)

    def of_kinds(self, kinds: Collection[str]) -> tuple[Snapshot, ...]:
        """All snapshots of some kinds, oldest first."""
        return tuple(each for each in self._table.all() if each.kind in kinds and each.deleted_at is None)

    def expired(self, now: float) -> tuple[Snapshot, ...]:
        """Snapshots whose time is over at `now`, seconds since the epoch."""
        return tuple(self._table.expired(now))

    def lineage(self, name_or_id: str) -> Lineage:
        """A snapshot's parent and children, deleted ones passed over.

        Raises:
            NotFound: there is no such snapshot.
        """
        return lineage.lineage(self.get(name_or_id), self._table.all())

    def tree(self, sandbox_id: str) -> tuple[Branch, ...]:
        """The snapshots taken of a sandbox, each below the one it was started from or taken after."""
        return lineage.tree(sandbox_id, self._table.all())

    # Using

    def path(self, file: StoredFile) -> Path:
        """Where a file of a record is."""
        return self._home / file.path

    def describe(self, capture: Capture, parent: Snapshot | None = None) -> Contents:
        """What a record says of a machine's capture into a draft; digests that the parent's record has
        are taken over.

        Raises:
            StoreCorrupt: a file is missing. StoreFault: one lies outside of the data directory.
        """
        return machine.describe(self._home, capture, parent)

    def saved(self, record: Snapshot) -> SavedState | None:
        """What a machine is restored from, besides `layers`; None for a snapshot of the disk alone."""
        return machine.saved(self._home, record)

    def layers(self, record: Snapshot) -> tuple[Layer, ...]:
        """A snapshot's disk layers, bottom up."""
        return machine.layers(self._home, record)

    def drives(self, attached: Iterable[Attached]) -> tuple[Drive, ...]:
        """What a machine is given of the drives on a record."""
        return machine.drives(self._home, attached)

    def require_files(self, record: Snapshot) -> None:
        """Check that all files of a snapshot are there with their lengths: before each use.

        Raises:
            StoreCorrupt: one is not; says which.
        """
        for file in record.files():
            problem = file_problem(self._home, file)
            if problem is not None:
                raise StoreCorrupt(f"snapshot {record.id} cannot be used: {problem.path} {problem.what}")

    @contextmanager
    def hold(self, name_or_id: str, *extra: str) -> Iterator[Snapshot]:
        """Keep the files of a snapshot, and others by name, while the block runs, although it is deleted
        or folded meanwhile.

        Raises:
            NotFound: there is no such snapshot.
        """
        hold = self.keep(self.get(name_or_id), *extra)
        try:
            yield hold.record
        finally:
            hold.release()

    def keep(self, record: Snapshot, *extra: str) -> Hold:
        """The same for longer than a block. Whoever runs from a snapshot keeps it, with `extra` for a file
        that its process has mapped and the record does not name any more. Holds are not recorded: after a
        start they are taken anew (see `recorded`), before the first `collect`."""
        return self._holds.take(record, extra)

    def held(self, snapshot_id: str) -> bool:
        """Whether somebody keeps a snapshot's files."""
        return snapshot_id in self._holds.ids

    def names_of(self, paths: Iterable[Path]) -> tuple[str, ...]:
        """How holds and records call those of the files that lie in the data directory."""
        return tuple(machine.stored(self._home, path) for path in paths if path.is_relative_to(self._home))

    def recorded(self, snapshot_id: str) -> Snapshot | None:
        """The record of an id, although it be deleted."""
        return self._table.get(snapshot_id)

    # Clearing away

    async def collect(self, *, in_use: Collection[str] = (), dry_run: bool = False) -> Garbage:
        """Remove the files that nobody refers to; returns what was, or with `dry_run` would be, removed.

        Args:
            in_use: ids to keep although they are deleted, besides those that are held here.
            dry_run: remove nothing.

        Raises:
            StoreFault: something cannot be removed; it is tried again the next time.
        """
        if not dry_run:
            self._strike_given_up()
        ids = [record.id for record in self._table.all()]
        present = await asyncio.to_thread(files.sizes, self._home, ROOT, ids)
        in_use = {*in_use, *self._holds.ids}
        found = collection.plan(self._table.all(), in_use, self._holds.files, present)
        if not dry_run:
            await settled(self._remove(found))
        return found

    def _strike_given_up(self) -> None:
        while self._given_up:
            self._ledger.strike(self._given_up[-1])
            self._given_up.pop()

    async def _remove(self, found: Garbage) -> None:
        # One that only named others' files has an empty directory.
        own = [f"{ROOT}/{snapshot_id}" for snapshot_id in found.records]
        await asyncio.to_thread(files.remove_files, self._home, found.files, own)
        self._table.drop(found.records)

    def users_of(self, path: Path) -> tuple[str, ...]:
        """The snapshots that need a file below the data directory, such as a template's image."""
        return collection.users(self._table.all(), machine.stored(self._home, path))

    def check(self, *, digests: bool = False, progress: Progress = silent) -> tuple[Problem, ...]:
        """Records against files: what is missing, of another length or content, or nobody's. Blocking;
        with `digests` about a second per GiB, of which `progress` is told."""
        records = self._table.all()
        known = {record.id for record in records} | {entry.name for entry in self._ledger.entries(kind=KIND)}
        problems = examine(self._home, records, self._holds.ids, digests=digests, progress=progress)
        return (*problems, *stray(self._home, known))
