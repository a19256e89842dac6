"""What is done for snapshots in the background, one thing at a time, and never in anybody's way: chains of
layers are kept short, and digests are taken of what was written.

Nothing here changes a file. A new one is written beside a snapshot's own, and put into its record in the
place of those that it is made of, in one transaction. Whoever runs from these goes on with them: they are
held until then. What a crash leaves unfinished no record names, so the next collection removes it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from agentenv.errors import AenvError, StoreFull
from agentenv.snapshot.chains import MIB, Limits, disk_fold, folded, memory_fold
from agentenv.snapshot.folding import quietly
from agentenv.snapshot.records import ROOT, DiskLayer, Fold, Memory, MemoryDelta, Snapshot, StoredFile
from agentenv.snapshot.store import Snapshots
from agentenv.vmm.stored import unreadable

log = logging.getLogger(__name__)

F = TypeVar("F", bound=StoredFile)

# Digests of these are taken: a fork point is gone before anybody could ask for one.
_DIGESTED = ("template", "pause", "checkpoint")


class Upkeep:
    """Looks after the snapshots of a node.

    Args:
        limits: above which chains are folded.
        rest_s: seconds that a snapshot is left alone at first. To start a program holds the node for some
            20 ms, and whoever paused a sandbox waits for the answer; and many snapshots are gone by then.
    """

    def __init__(self, snapshots: Snapshots, limits: Limits, *, rest_s: float = 0.0) -> None:
        self._rest_s = rest_s
        self._snapshots = snapshots
        self._limits = limits
        self._due: dict[str, float] = {}  # ids and when, on the loop's clock, as they were asked for
        self._task: asyncio.Task[None] | None = None
        self._one = asyncio.Lock()
        self._open = False
        self.starts: Callable[[str], int] = lambda _: 0
        self.changed: Callable[[str], None] = lambda _: None

    def start(self, *, starts: Callable[[str], int], changed: Callable[[str], None]) -> None:
        """Begin, with what an earlier life did not come to.

        Args:
            starts: how many sandboxes were started from a snapshot.
            changed: called with the id of a snapshot whose record has other files than before.
        """
        self.starts, self.changed = starts, changed
        self._open = True
        for record in self._snapshots.of_kinds(_DIGESTED):
            self.look(record.id)

    async def stop(self) -> None:
        """Give up what is under way, and begin nothing any more."""
        self._open = False
        self._due.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self, snapshot_id: str) -> None:
        """See by and by what is to be done for a snapshot: it is new, or was started from."""
        if not self._open:
            return
        self._due.setdefault(snapshot_id, asyncio.get_running_loop().time() + self._rest_s)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name="upkeep of snapshots")

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done now."""
        return not self._due and (self._task is None or self._task.done())

    async def _work(self) -> None:
        while self._due:
            snapshot_id, due = next(iter(self._due.items()))
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            del self._due[snapshot_id]
            try:
                await self._tend(snapshot_id)
            except AenvError as error:  # nobody waits for it; it was as good before
                log.warning("snapshot %s is left as it is: %s", snapshot_id, error)
            await asyncio.sleep(0)  # where there are many with nothing to do, requests come in between

    async def _tend(self, snapshot_id: str) -> None:
        await self.fold(snapshot_id)
        record = self._snapshots.recorded(snapshot_id)
        if record is not None and record.deleted_at is None and record.kind in _DIGESTED:
            await self.take_digests(snapshot_id)

    # Folding

    async def fold(self, snapshot_id: str) -> Snapshot | None:
        """Make a snapshot's chains as short as the limits want them; None when it is gone. One that is
        deleted is still what the machines on its line build upon.

        Raises:
            StoreCorrupt: a layer cannot be used. StoreFull, StoreFault, HostFault: it cannot be done;
                all is as it was.
        """
        async with self._one:
            record = self._needed(snapshot_id)
            return None if record is None else await self._fold(record)

    async def _fold(self, record: Snapshot) -> Snapshot:
        record = self._as_parent(record)
        for index, disk in enumerate(record.disks):
            ground = self._ground(disk)
            first = disk_fold([layer.bytes for layer in disk[ground:]], self._limits)
            if first is not None:
                record = await self._fold_disk(record, index, ground + first)
        if record.memory is not None:
            # Nobody starts from a fork point, or from a deleted one, any more.
            lasting = record.deleted_at is None and record.kind != "fork"
            form = memory_fold(record.memory, self.starts(record.id) if lasting else 0, self._limits)
            if form is not None:
                record = await self._fold_memory(record, record.memory, flat=form == "flat")
        return record

    async def flatten(self, snapshot_id: str) -> None:
        """Give a snapshot a flat memory file now, whatever the limits say; nothing, when it has one.

        Raises:
            StoreCorrupt, StoreFull, StoreFault, HostFault: as `fold`.
        """
        async with self._one:
            record = self._needed(snapshot_id)
            if record is not None and record.memory is not None and record.memory.deltas:
                await self._fold_memory(record, record.memory, flat=True)

    def _needed(self, snapshot_id: str) -> Snapshot | None:
        record = self._snapshots.recorded(snapshot_id)
        if record is None or (record.deleted_at is not None and not self._snapshots.held(snapshot_id)):
            return None
        return record

    def _as_parent(self, record: Snapshot) -> Snapshot:
        """A record with what has taken the place of its parent's layers since it was made."""
        parent = None if record.parent is None else self._snapshots.recorded(record.parent)
        if parent is None or not parent.folds:
            return record
        known = {file.path: file for file in (*parent.files(), *record.files())}
        found = [folded([layer.path for layer in disk], parent.folds) for disk in record.disks]
        on_disk = {fold for _, folds in found for fold in folds}
        image = [] if record.memory is None else [file.path for file in _chain(record.memory)]
        memory, in_memory = folded(image, parent.folds)
        used = tuple(fold for fold in parent.folds if fold in on_disk or fold in in_memory)
        if not used or not known.keys() >= {*memory, *(name for names, _ in found for name in names)}:
            return record
        disks = [tuple(_typed(known[name], DiskLayer) for name in names) for names, _ in found]
        return self._put(
            record.id,
            disks,
            memory=_memory([known[name] for name in memory]) if memory else None,
            folds=(*record.folds, *used),
        )

    def _ground(self, disk: Sequence[DiskLayer]) -> int:
        """How many of the lowest layers of a disk are an image's or a template's, which others share."""
        for count, layer in enumerate(disk):
            root, _, rest = layer.path.partition("/")
            owner = self._snapshots.recorded(rest.partition("/")[0]) if root == ROOT else None
            if root == ROOT and (owner is None or owner.kind != "template"):
                return count
        return len(disk)

    async def _fold_disk(self, record: Snapshot, index: int, first: int) -> Snapshot:
        """Make one layer of those from `first` on of one of the disks."""
        run = record.disks[index][first:]
        target = _new_name(record, "disk")
        hold = self._snapshots.keep(record, target)
        try:
            self._require_space(run)
            layers = [str(self._snapshots.path(layer)) for layer in run]
            size = await self._written(target, "fold_disk", layers=layers)
            made = DiskLayer(target, size)
            fold = Fold(target, tuple(layer.path for layer in run))
            log.info("snapshot %s: %d disk layers are one of %d bytes", record.id, len(run), size)
            disks = list(record.disks)
            disks[index] = (*disks[index][:first], made)
            return self._put(record.id, disks, folds=(*record.folds, fold))
        finally:
            hold.release()

    async def _fold_memory(self, record: Snapshot, memory: Memory, *, flat: bool) -> Snapshot:
        target = _new_name(record, "memory")
        hold = self._snapshots.keep(record, target, f"{target}.map")
        base, deltas = memory.base, memory.deltas
        try:
            self._require_space(_chain(memory) if flat else deltas)
            size = await self._written(
                target,
                "fold_memory",
                base=str(self._snapshots.path(base)),
                deltas=[str(self._snapshots.path(delta)) for delta in deltas],
                size=base.bytes,
                flat=flat,
            )
            made = Memory(StoredFile(target, size)) if flat else Memory(base, (MemoryDelta(target, size),))
            fold = Fold(target, tuple(file.path for file in (_chain(memory) if flat else deltas)))
            log.info("snapshot %s: %d memory layers are one of %d bytes", record.id, len(deltas), size)
            return self._put(record.id, memory=made, folds=(*record.folds, fold))
        finally:
            hold.release()

    def _require_space(self, files: Sequence[StoredFile]) -> None:
        """Raise StoreFull where one more copy of files would take what is to stay free."""
        needed = sum(_allocated(self._snapshots.path(file)) for file in files)
        free = shutil.disk_usage(self._snapshots.home).free
        if free - needed < self._limits.spare_bytes:
            raise StoreFull(
                f"{free // MIB} MiB are free, of which {self._limits.spare_bytes // MIB} stay so,"
                f" and one file in the place of {len(files)} takes up to {needed // MIB}"
            )

    async def _written(self, target: str, what: str, **work: object) -> int:
        path = self._snapshots.home / target
        try:
            return int(await quietly(what, into=str(path), **work))
        except BaseException:
            for part in (path, path.with_name(f"{path.name}.map")):  # the program may have been ended
                part.unlink(missing_ok=True)
            raise

    def _put(
        self, snapshot_id: str, disks: Sequence[tuple[DiskLayer, ...]] | None = None, **changes: object
    ) -> Snapshot:
        """Change a record, as it is by now; it is kept by then, so it is there."""
        now = self._snapshots.recorded(snapshot_id)
        assert now is not None
        if disks is not None:
            now = now.with_disks(disks)
        made = self._snapshots.update(replace(now, **changes))  # type: ignore[arg-type]
        self.changed(snapshot_id)
        return made

    # Digests

    async def take_digests(self, snapshot_id: str) -> Snapshot | None:
        """Compute the digests of the files that a snapshot added and keep them in its record; None when
        it is gone.

        Raises:
            StoreCorrupt, StoreFault: a file cannot be read. HostFault: it cannot be done.
        """
        async with self._one:
            record = self._needed(snapshot_id)
            return None if record is None else await self._digest(record)

    async def _digest(self, record: Snapshot) -> Snapshot | None:
        hold = self._snapshots.keep(record)
        try:
            wanted = [file for file in record.own_files() if file.digest is None]
            if not wanted:
                return record
            parts = [[str(self._snapshots.home / part) for part in file.parts] for file in wanted]
            found = await quietly("digests", files=parts)
            digests = {file.path: digest for file, digest in zip(wanted, found, strict=True)}
            now = self._snapshots.recorded(record.id)
            return None if now is None else self._snapshots.update(_with_digests(now, digests))
        finally:
            hold.release()


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError as error:
        raise unreadable(path, error) from error


def _new_name(record: Snapshot, kind: str) -> str:
    return f"{ROOT}/{record.id}/{kind}-{secrets.token_hex(4)}"


def _chain(memory: Memory) -> tuple[StoredFile, ...]:
    return (memory.base, *memory.deltas)


def _memory(files: Sequence[StoredFile]) -> Memory:
    base, *deltas = files
    return Memory(base, tuple(_typed(delta, MemoryDelta) for delta in deltas))


def _typed(file: StoredFile, kind: type[F]) -> F:
    assert isinstance(file, kind)
    return file


def _with_digests(record: Snapshot, digests: dict[str, str]) -> Snapshot:
    memory = record.memory
    if memory is not None:
        deltas = tuple(_digested(delta, digests) for delta in memory.deltas)
        memory = Memory(_digested(memory.base, digests), deltas)
    state = record.state and _digested(record.state, digests)
    disks = (tuple(_digested(layer, digests) for layer in disk) for disk in record.disks)
    return replace(record.with_disks(disks), memory=memory, state=state)


def _digested(file: F, digests: dict[str, str]) -> F:
    return replace(file, digest=digests.get(file.path, file.digest))
