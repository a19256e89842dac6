"""Making one flat memory file of a snapshot's layers."""

from __future__ import annotations

from pathlib import Path

from agentenv.snapshot import files
from agentenv.snapshot.records import Memory
from agentenv.vmm.memory import Image, fold


def fold_into(home: Path, memory: Memory, target: str, durable: bool) -> int:
    """Write the file `target` below `home`; returns its length. Blocking.

    Raises:
        StoreCorrupt: a layer cannot be used. StoreFull, StoreFault: it cannot be written; it is not there.
    """
    path = home / target
    path.unlink(missing_ok=True)  # nobody refers to one that is there: it was left by a crash
    layers = [home / delta.path for delta in memory.deltas]
    with Image(home / memory.base.path, layers, size=memory.base.bytes) as image:
        fold(image, path)
    if durable:
        files.sync([path, path.parent])
    return memory.base.bytes
