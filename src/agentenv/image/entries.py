"""What the cache holds, on the disk: a directory per content, in it a root filesystem per disk size.

    cache/FORMAT-HEX/image.json    configuration and what follows from the content
    cache/FORMAT-HEX/MIB-ONCE.ext4 its time of change is when it was last used

A name is never given twice: layers lie over a certain file, and one that is made again of the same content
has other blocks in other places. Beside them `pointers/`: what a reference or a file meant when it was last
looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.image.config import ImageConfig
from agentenv.image.tree import host_faults

# Raise it when the same content makes another filesystem than before.
FORMAT = 1
GROWABLE_MIB = 256  # smaller ones have few inodes in each group of blocks, and would have few for good
GROWN_MIB_MAX = 65536  # how far a disk of unstated size grows for its image


@dataclass(frozen=True)
class CachedImage:
    """A root filesystem in the cache.

    `digest` names the image's content (its configuration's digest, which names the layers'; of a root
    filesystem that is no image, that of its bytes). `rootfs` is an ext4 file that nobody changes;
    `disk_mib` is its size as the guest sees it, `size_bytes` what it takes on the host.
    """

    digest: str
    rootfs: Path
    disk_mib: int
    size_bytes: int
    config: ImageConfig
    default_user: str
    default_workdir: str


@dataclass(frozen=True)
class Facts:
    """What follows from an image's content alone. `needed_mib` is the least disk with room to work."""

    digest: str
    needed_mib: int
    config: ImageConfig
    default_user: str
    default_workdir: str

    def document(self) -> str:
        """As JSON."""
        return json.dumps({**vars(self), "config": self.config.document()})

    @classmethod
    def from_document(cls, text: str) -> Facts:
        """The inverse of `document`."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "config": ImageConfig.from_document(values["config"])})

    def target_mib(self, asked: int | None, default: int) -> int:
        """The disk's size: what is asked for, or the default or as much more as the image needs."""
        return asked or min(max(default, self.needed_mib), max(default, GROWN_MIB_MAX))


class Entries:
    """The cache in a directory, which need not exist. All functions block, for less than a millisecond."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def place(self, digest: str) -> Path:
        """The directory of a content."""
        return self.directory / f"{FORMAT}-{digest.removeprefix('sha256:')}"

    def facts(self, digest: str) -> Facts | None:
        """What is known of a content, if anything is here."""
        try:
            return Facts.from_document((self.place(digest) / "image.json").read_text())
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def find(self, digest: str, asked_mib: int | None, default_mib: int) -> CachedImage | None:
        """The root filesystem of a content with that disk, used from now on, if it is here."""
        facts = self.facts(digest)
        if facts is None:
            return None
        disk_mib = facts.target_mib(asked_mib, default_mib)
        for rootfs in self._of_size(digest, disk_mib):
            with suppress(FileNotFoundError):  # it is being removed
                os.utime(rootfs)
                size = rootfs.stat().st_blocks * 512
                return CachedImage(
                    digest, rootfs, disk_mib, size, facts.config, facts.default_user, facts.default_workdir
                )
        return None

    def _of_size(self, digest: str, disk_mib: int) -> list[Path]:
        return sorted(self.place(digest).glob(f"{disk_mib}-*.ext4"))

    def below(self, digest: str, disk_mib: int) -> Path | None:
        """The largest root filesystem of a content that can be grown to a disk of that size."""
        sizes = {int(path.stem.partition("-")[0]): path for path in self.place(digest).glob("*-*.ext4")}
        fitting = [size for size in sizes if GROWABLE_MIB <= size < disk_mib]
        return sizes[max(fitting)] if fitting else None

    def publish(self, facts: Facts, disk_mib: int, rootfs: Path) -> None:
        """Put a finished root filesystem in its place, unless there is one, as when a directory is unpacked
        again: what is there may be in use.

        Raises:
            StoreFull, HostFault: it cannot be.
        """
        place = self.place(facts.digest)
        with host_faults(str(place)):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_text(place / "image.json", facts.document())
            if self._of_size(facts.digest, disk_mib):
                rootfs.unlink()
                return
            os.utime(rootfs)
            rootfs.rename(place / f"{disk_mib}-{uuid.uuid4().hex[:12]}.ext4")
            for directory in (place, self.directory):  # a record that names it may be synced at once
                sync_directory(directory)

    # Pointers

    def point(self, what: str, **meant: str) -> None:
        """Remember what a reference or file means."""
        path = self._pointer(what)
        with host_faults(str(path)):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_text(path, json.dumps({"what": what, **meant}))

    def pointed(self, what: str) -> Mapping[str, str] | None:
        """What it meant when it was last looked at."""
        with suppress(FileNotFoundError, ValueError):
            found = json.loads(self._pointer(what).read_text())
            if found.get("what") == what:
                return {key: str(value) for key, value in found.items()}
        return None

    def _pointer(self, what: str) -> Path:
        return self.directory / "pointers" / hashlib.sha256(what.encode()).hexdigest()


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive the host."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small file as a whole."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        temporary.write_text(text)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
