"""Root filesystems of images, made once per content and kept within a budget: what others get images from.

The same content is the same file, whatever it was called and whoever asked: an image by its configuration's
digest, a tarball by its bytes, and in that by the size of the disk. Files are never changed. What templates,
snapshots and holds need stays; the rest goes by use, when it is more than the budget.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
import uuid
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentenv.config import Settings
from agentenv.errors import AenvError, InvalidRequest, NotFound, Unreachable
from agentenv.image import eviction, locking, source
from agentenv.image.blobs import BlobStore
from agentenv.image.conversion import Conversion
from agentenv.image.credentials import Credentials
from agentenv.image.entries import CachedImage, Entries
from agentenv.image.eviction import Kept
from agentenv.image.holds import Hold, Holds, is_alive
from agentenv.image.reference import Reference
from agentenv.image.registry.access import Access
from agentenv.image.source import Bootstrap, Located, Remote
from agentenv.image.tree import host_faults, remove_scratch
from agentenv.image.worker import Job
from agentenv.proc import start_time
from agentenv.progress import Progress
from agentenv.records.database import Database
from agentenv.records.ledger import Entry, Ledger
from agentenv.vmm.settle import settled

__all__ = ["CachedImage", "Credentials", "Hold", "Images", "reap"]

log = logging.getLogger(__name__)

KIND = "image-build"
MIB = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """A source, looked at: `text` with a tag replaced by a digest, the content's digest if that is known, and
    the blobs that it takes. `pointer` is what to remember it by."""

    text: str
    digest: str | None
    blobs: tuple[str, ...] = ()
    pointer: str | None = None


@dataclass
class _Flight:
    """A conversion under way, and those who wait for it."""

    task: asyncio.Task[str]
    listeners: list[Progress] = field(default_factory=list)
    waiting: int = 0

    def tell(self, text: str) -> None:
        for listener in self.listeners:
            listener(text)


class Images:
    """The cache of a data directory. One per process; several processes may use the same directory."""

    def __init__(self, settings: Settings, database: Database, ledger: Ledger) -> None:
        self._settings = settings
        self._database = database
        self._ledger = ledger
        self._entries = Entries(settings.cache_dir)
        self._blobs = BlobStore(settings.blobs_dir)
        self._holds = Holds(ledger)
        self._flights: dict[str, _Flight] = {}
        self._turns = asyncio.Semaphore(settings.image_conversions)
        self._background: set[asyncio.Task[None]] = set()
        self.present = self.converted = 0  # of the images that were asked for

    async def get(
        self,
        source: str,
        *,
        credentials: Credentials | None = None,
        disk_mib: int | None = None,
        progress: Progress,
    ) -> CachedImage:
        """The root filesystem of a SOURCE (see `agentenv.image.source`), pulled and converted unless it is
        there. Those who ask for the same at once share one conversion.

        What is returned stays for ten minutes although nobody holds it; whoever goes on using it puts its
        path into a record (a template's `rootfs`, a snapshot's disk layer), and keeps it until then: `keep`.

        Args:
            source: the SOURCE, `debootstrap:` excepted. A tag is resolved anew each time, which is one small
                request; when the registry does not answer, what it meant last is taken if that is here. An
                image named by digest needs no request once it is here.
            credentials: for the registry, this time only; they go before those of Docker's configuration.
            disk_mib: MiB of the filesystem; unset, the node's default or as much more as the image needs.
            progress: told in a few words what is being done.

        Raises:
            NotFound: no such image, or no such file.
            Forbidden: the registry refuses the credentials, or wants some.
            InvalidRequest: not an image, not for this machine, or too large for the disk.
            StoreCorrupt: content is damaged, or is not what its digest says.
            StoreFull: no space on the host.
            Unreachable: the registry does not answer, and the image was never here.
        """
        wanted = await self._look(source, credentials, progress)
        if found := self._find(wanted.digest, disk_mib):
            progress(f"{source} is here already")
            self.present += 1
            return found
        digest = await self._converted(wanted, credentials, disk_mib, progress)
        if wanted.pointer is not None:
            self._entries.point(wanted.pointer, digest=digest)
        found = self._find(digest, disk_mib)
        if found is None:
            raise NotFound(
                f"what was made of {source} is gone already", remedy="see that nobody empties the cache"
            )
        self.converted += 1
        return found

    @property
    def converting(self) -> int:
        """How many images are being pulled or converted."""
        return len(self._flights)

    def keep(self, digest: str) -> Hold:
        """Keep what there is of an image, and what comes: nothing held is evicted. Templates and snapshots on
        record hold theirs by their records."""
        return self._holds.take(digest)

    async def evict(self, now: float | None = None) -> tuple[Path, ...]:
        """Bring what nothing needs down to the budget; returns what went. `now`: seconds since the epoch."""
        now = time.time() if now is None else now
        cache, budget = self._settings.cache_dir, self._settings.image_cache_mib * MIB
        present = await asyncio.to_thread(eviction.present, cache, self._settings.blobs_dir)
        if sum(kept.size for kept in present) <= budget:
            return ()  # whoever needs what
        going = eviction.plan(present, self._needed(present), budget, now)
        gone = await settled(asyncio.to_thread(eviction.remove, going))
        if gone:
            await settled(asyncio.to_thread(eviction.prune_pointers, cache))
        return gone

    async def close(self) -> None:
        """Call off what is under way, and wait for what is being cleaned up."""
        flights = [flight.task for flight in self._flights.values()]
        for task in flights:
            task.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        await asyncio.gather(*self._background)

    # Looking

    def _find(self, digest: str | None, disk_mib: int | None) -> CachedImage | None:
        return self._entries.find(digest, disk_mib, self._settings.disk_mib) if digest else None

    async def _look(self, text: str, credentials: Credentials | None, progress: Progress) -> Wanted:
        meant = source.parse(text, os.path.lexists)
        if isinstance(meant, Bootstrap):
            raise InvalidRequest(
                f"{text} is packages, not an image", remedy=f"aenv template create NAME --from {text}"
            )
        if isinstance(meant, Located):
            return self._look_at_file(text, meant)
        return await self._resolve(meant, credentials, progress)

    def _look_at_file(self, text: str, meant: Located) -> Wanted:
        path = meant.path.resolve()
        telling = path / "index.json" if path.is_dir() else path
        if not telling.is_file():
            return Wanted(text, None)
        status = telling.stat()
        which = f"{meant.kind} {meant.tag} {meant.digest}"
        pointer = f"file {path} {status.st_ino} {status.st_size} {status.st_mtime_ns} {which}"
        known = self._entries.pointed(pointer) or {}
        return Wanted(text, known.get("digest"), pointer=pointer)

    async def _resolve(self, meant: Remote, credentials: Credentials | None, progress: Progress) -> Wanted:
        # httpx takes 150 ms to import, and a process that pulls nothing does without.
        from agentenv.image.registry.client import Client
        from agentenv.image.registry.pull import Puller

        reference, access = meant.reference, Access.of(self._settings)
        pointer = f"image {reference}"
        progress(f"looking up {reference}")
        try:
            async with Client(access, reference.repository, credentials) as client:
                manifest = await Puller(client, self._blobs, reference).resolve()
        except Unreachable as error:
            known = self._entries.pointed(pointer)
            if known is None or self._entries.facts(known["digest"]) is None:
                raise
            log.warning("%s; using what %s was last", error.message, reference)
            progress(f"{error.message}; using what it was last")
            return Wanted(_pinned(reference, known["manifest"]), known["digest"])
        except NotFound as error:
            if meant.assumed:
                error.remedy = "nor is there such a file here"
            raise
        self._entries.point(pointer, digest=manifest.config.digest, manifest=manifest.digest)
        blobs = (manifest.digest, manifest.config.digest, *(layer.digest for layer in manifest.layers))
        return Wanted(_pinned(reference, manifest.digest), manifest.config.digest, blobs)

    # Making

    async def _converted(
        self, wanted: Wanted, credentials: Credentials | None, disk_mib: int | None, progress: Progress
    ) -> str:
        """Convert, or wait for those who do already; returns the content's digest."""
        size = disk_mib or f"default {self._settings.disk_mib}"
        key = f"{wanted.digest or wanted.pointer or wanted.text} {size}"
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = self._begin(key, wanted, credentials, disk_mib)
        flight.listeners.append(progress)
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.listeners.remove(progress)
            flight.waiting -= 1
            if flight.waiting == 0 and not flight.task.done():
                self._landed(key, flight)  # whoever comes now begins anew
                flight.task.cancel()
                await asyncio.wait({flight.task})

    def _begin(
        self, key: str, wanted: Wanted, credentials: Credentials | None, disk_mib: int | None
    ) -> _Flight:
        def tell(text: str) -> None:
            flight.tell(text)

        task = asyncio.create_task(self._convert(key, wanted, credentials, disk_mib, tell))
        flight = _Flight(task)
        task.add_done_callback(lambda done: self._landed(key, flight))
        return flight

    def _landed(self, key: str, flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done() and not flight.task.cancelled():
            flight.task.exception()  # seen, though nobody may wait any more

    async def _convert(
        self,
        key: str,
        wanted: Wanted,
        credentials: Credentials | None,
        disk_mib: int | None,
        progress: Progress,
    ) -> str:
        async with self._turns:
            scratch = self._settings.images_dir / f".image-{uuid.uuid4()}"
            with host_faults(str(scratch)):
                self._settings.images_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            entry = self._ledger.record(
                wanted.digest or wanted.text,
                KIND,
                str(scratch),
                blobs=wanted.blobs,
                pid=os.getpid(),
                started=start_time(os.getpid()),
            )
            job = Job(
                source=wanted.text,
                flight=hashlib.sha256(key.encode()).hexdigest(),
                digest=wanted.digest,
                disk_mib=disk_mib,
                default_mib=self._settings.disk_mib,
                cache=self._settings.cache_dir,
                blobs=self._settings.blobs_dir,
                scratch=scratch,
                access=Access.of(self._settings),
                credentials=credentials,
            )
            conversion = Conversion(job)
            try:
                digest = await conversion.run(lambda pid: self._started(entry, pid), progress)
            except BaseException:
                await settled(self._clean(conversion, entry))
                raise
            self._later(self._after(conversion, entry))
            return digest

    def _started(self, entry: Entry, pid: int) -> None:
        self._ledger.amend(entry, worker=pid, worker_started=start_time(pid))

    async def _after(self, conversion: Conversion, entry: Entry) -> None:
        """What nobody waits for: the worker removes its tree, and the cache keeps to its budget."""
        try:
            await self._clean(conversion, entry)
            await self.evict()
        except AenvError as error:
            log.warning("after the conversion of an image: %s", error)

    async def _clean(self, conversion: Conversion, entry: Entry) -> None:
        await conversion.close()
        # What a worker that was killed has left, if it was:
        await asyncio.to_thread(remove_scratch, Path(entry.name))
        locking.sweep(self._settings.cache_dir / "locks")
        self._ledger.strike(entry)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _needed(self, present: Collection[Kept]) -> frozenset[Path]:
        """What records, holds and conversions under way need."""
        named = {self._settings.cache_dir / name for name in eviction.named_in_records(self._database)}
        builds = self._ledger.entries(kind=KIND)
        blobs = {self._blobs.path(digest) for entry in builds for digest in entry.detail["blobs"]}
        places = {self._entries.place(digest) for digest in self._holds.digests()}
        return frozenset(named | blobs | {kept.path for kept in present if kept.path.parent in places})


def reap(ledger: Ledger) -> tuple[str, ...]:
    """Remove what conversions of dead processes left; returns the directories. One that runs is kept."""
    gone = []
    for entry in ledger.entries(kind=KIND):
        if not is_alive(ledger, entry):
            remove_scratch(Path(entry.name))
            ledger.strike(entry)
            gone.append(entry.name)
    return tuple(gone)


def _pinned(reference: Reference, digest: str) -> str:
    return f"docker:{replace(reference, tag=None, digest=digest)}"
