"""Root filesystems of images, made once per content and kept within a budget: what others get images from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentenv.config import Settings
from agentenv.image.config import ImageConfig
from agentenv.image.credentials import Credentials
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger

Progress = Callable[[str], None]


@dataclass(frozen=True)
class CachedImage:
    """A root filesystem in the cache.

    `digest` names the image's content (its configuration's digest, of which the layers' follow).
    `rootfs` is an ext4 file that nobody changes; `disk_mib` is its size as the guest sees it,
    `size_bytes` what it takes on the host.
    """

    digest: str
    rootfs: Path
    disk_mib: int
    size_bytes: int
    config: ImageConfig
    default_user: str
    default_workdir: str


class Hold:
    """Keeps what the cache has of an image, until released or until this process is gone."""

    def release(self) -> None:
        """End it; repeatable."""
        raise NotImplementedError

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *fault: object) -> None:
        self.release()


class Images:
    """The cache of a data directory. One per process; several processes may use the same directory."""

    def __init__(self, settings: Settings, database: Database, ledger: Ledger) -> None:
        raise NotImplementedError

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

        What is returned stays for a while although nobody holds it; whoever goes on using it puts its path
        into a record (a template's `rootfs`, a snapshot's disk layer), and keeps it until then: `keep`.

        Args:
            source: the SOURCE. A tag is resolved anew each time, which is one small request.
            credentials: for the registry, this time only; they go before those of the Docker
                configuration.
            disk_mib: MiB of the filesystem; unset, the node's default or as much more as the image needs.
            progress: told in a few words what is being done.

        Raises:
            NotFound: no such image, or no such file.
            Unauthorized, Forbidden: the registry refuses the credentials, or wants some.
            InvalidRequest: not an image, not for this machine, or too large for the disk.
            StoreCorrupt: content is damaged, or is not what its digest says.
            StoreFull: no space on the host.
            Unreachable: the registry does not answer, and the image was never here.
        """
        raise NotImplementedError

    def keep(self, digest: str) -> Hold:
        """Keep what there is of an image: nothing held is evicted. Templates and snapshots on record hold
        theirs by their records."""
        raise NotImplementedError
