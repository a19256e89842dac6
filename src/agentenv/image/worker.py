"""Makes one root filesystem, in a process of its own: `python -m agentenv.image.worker`.

Unpacking is Python that keeps a processor busy for seconds: in the node it would be in the way of every
request that the node relays. One line of JSON comes on stdin (it may hold credentials, which no command line
does); lines of JSON go out: `progress`, then `done` or `error`. Stdin is kept open by whoever waits: when it
ends, the work is called off and nothing is left.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentenv.errors import AenvError
from agentenv.image import ext4
from agentenv.image.blobs import BlobStore
from agentenv.image.build import build_rootfs
from agentenv.image.credentials import Credentials
from agentenv.image.entries import GROWN_MIB_MAX, Entries, Facts
from agentenv.image.locking import lock
from agentenv.image.registry.access import Access
from agentenv.image.remote import Registries
from agentenv.image.tree import host_faults, remove_scratch
from agentenv.progress import document

MODULE = "agentenv.image.worker"


@dataclass(frozen=True)
class Job:
    """What is to be made, and where. `digest` is the content's where that is known before; `flight` names
    what is being made, for processes that want the same at once."""

    source: str
    flight: str
    digest: str | None
    disk_mib: int | None
    default_mib: int
    cache: Path
    blobs: Path
    scratch: Path
    access: Access
    credentials: Credentials | None = field(default=None, repr=False)

    def document(self) -> dict[str, Any]:
        """As a JSON object."""
        paths = {name: str(getattr(self, name)) for name in ("cache", "blobs", "scratch")}
        credentials = asdict(self.credentials) if self.credentials else None
        return {**vars(self), **paths, "access": self.access.document(), "credentials": credentials}

    @classmethod
    def from_document(cls, values: dict[str, Any]) -> Job:
        """The inverse of `document`."""
        paths = {name: Path(values[name]) for name in ("cache", "blobs", "scratch")}
        credentials = Credentials(**values["credentials"]) if values["credentials"] else None
        access = Access.from_document(values["access"])
        return cls(**{**values, **paths, "access": access, "credentials": credentials})


def tell(**line: Any) -> None:
    """A line to whoever waits; if nobody does any more, stdin says so."""
    with suppress(BrokenPipeError):
        print(json.dumps(line), flush=True)


async def make(job: Job) -> str:
    """Have the root filesystem in the cache; returns the content's digest."""
    entries = Entries(job.cache)
    if job.digest is not None and await _from_cache(job, entries, job.digest):
        return job.digest
    default = job.disk_mib or job.default_mib
    built = await build_rootfs(
        job.source,
        job.scratch / "rootfs.ext4",
        disk_mib=default,
        max_disk_mib=job.disk_mib or max(default, GROWN_MIB_MAX),
        scratch=job.scratch,
        progress=lambda text: tell(progress=document(text)),
        registries=Registries(job.access, BlobStore(job.blobs), job.credentials),
        keep_tree=True,
    )
    facts = Facts(built.digest, built.needed_mib, built.config, built.default_user, built.default_workdir)
    entries.publish(facts, built.disk_mib, built.path)
    return built.digest


async def _from_cache(job: Job, entries: Entries, digest: str) -> bool:
    """Whether the content is there after all, or was there with a smaller disk and could be grown."""
    if entries.find(digest, job.disk_mib, job.default_mib):
        return True  # another process made it while this one waited for its lock
    facts = entries.facts(digest)
    if facts is None:
        return False
    disk_mib = facts.target_mib(job.disk_mib, job.default_mib)
    smaller = entries.below(digest, disk_mib)
    if smaller is None:
        return False
    tell(progress=document(f"growing the filesystem ({disk_mib} MiB)"))
    job.scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    grown = job.scratch / "rootfs.ext4"
    await ext4.grow(smaller, grown, disk_mib)
    with host_faults(str(grown)):
        ext4.seal(grown)
    entries.publish(facts, disk_mib, grown)
    return True


async def called_off() -> None:
    """Return when stdin ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while await reader.read(1024):
        pass


async def work(job: Job) -> None:
    """Do the job unless it is called off, and say how it went."""
    making = asyncio.create_task(make(job))
    off = asyncio.create_task(called_off())
    await asyncio.wait({making, off}, return_when=asyncio.FIRST_COMPLETED)
    if not making.done():
        making.cancel()
        await asyncio.wait({making})
    off.cancel()
    if making.cancelled():
        return
    error = making.exception()
    if isinstance(error, AenvError):
        tell(
            error=type(error).__name__,
            message=error.message,
            remedy=error.remedy,
            retry_after=error.retry_after,
        )
    elif error is not None:
        raise error
    else:
        tell(done=making.result())


def main() -> None:
    """Read the job, wait for its turn, do it; whoever waits has the answer before the tree is removed."""
    job = Job.from_document(json.loads(sys.stdin.readline()))
    try:
        with lock(job.cache / "locks" / job.flight):
            asyncio.run(work(job))
    finally:
        remove_scratch(job.scratch)


if __name__ == "__main__":
    main()
