"""A snapshot in the making: a directory of its own that no record names yet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentenv.errors import StoreCorrupt
from agentenv.records.ledger import Entry
from agentenv.snapshot.records import ROOT, DiskLayer, MemoryDelta, StoredFile
from agentenv.vmm.stored import map_of, unwritable


@dataclass(frozen=True)
class Draft:
    """The directory `path` is filled with `state`, `memory` (with `memory.map` for a delta) and `disk`,
    by a machine's capture or by hand; what was put there is then told as the record will have it."""

    id: str
    path: Path
    entry: Entry

    def take(self, source: Path, name: Literal["state", "memory", "disk"]) -> None:
        """Give the draft a file that lies elsewhere on the filesystem, as a second name of it: should the
        draft come to nothing, the machine that goes on from a sealed layer still has it.

        Raises:
            StoreFull, StoreFault: the name cannot be made.
        """
        try:
            os.link(source, self.path / name)
        except OSError as error:
            raise unwritable(self.path / name, error) from error

    def state(self) -> StoredFile:
        """The device state."""
        return StoredFile(*self._file("state"))

    def flat_memory(self) -> StoredFile:
        """The whole memory."""
        return StoredFile(*self._file("memory"))

    def memory_delta(self) -> MemoryDelta:
        """The changed pages."""
        self._file(map_of(Path("memory")).name)
        return MemoryDelta(*self._file("memory"))

    def disk(self, name: str = "disk") -> DiskLayer:
        """A sealed qcow2 layer."""
        return DiskLayer(*self._file(name))

    def _file(self, name: str) -> tuple[str, int]:
        try:
            return f"{ROOT}/{self.id}/{name}", (self.path / name).stat().st_size
        except OSError as error:
            raise StoreCorrupt(f"the snapshot {self.id} has no {name}: {error.strerror}") from error
