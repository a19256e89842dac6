"""Work on layers, as a program: `python -m agentenv.snapshot.work JSON` prints one line of JSON.

What is needed for one piece of work only is imported by it: most of the time of a small one is imports.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentenv.errors import AenvError, StoreCorrupt, StoreFault, StoreFull

ERRORS: dict[str, type[AenvError]] = {each.code: each for each in (StoreCorrupt, StoreFull, StoreFault)}


def main(argument: str) -> None:
    """Do the work that the argument describes, and say how it went."""
    work = json.loads(argument)
    try:
        result = {"done": WORK[work.pop("what")](**work)}
    except AenvError as error:
        result = {"error": str(error), "code": error.code if error.code in ERRORS else StoreFault.code}
    print(json.dumps(result))


def fold_memory(base: str, deltas: list[str], size: int, into: str, flat: bool) -> int:
    """Write one flat file, or one delta, of a memory in layers; returns its length.

    Raises:
        StoreCorrupt: a layer cannot be used. StoreFull, StoreFault: it cannot be written; it is not there.
    """
    from agentenv.snapshot import files
    from agentenv.vmm.memory import Image, fold, merge
    from agentenv.vmm.stored import map_of

    path = Path(into)
    with Image(Path(base), [Path(each) for each in deltas], size=size) as image:
        if flat:
            fold(image, path)
        else:
            merge(image, path)
    files.sync([path, path.parent] if flat else [path, map_of(path), path.parent])
    return path.stat().st_size


def fold_disk(layers: list[str], into: str) -> int:
    """Write one layer of several, bottom up; returns its length.

    Raises:
        StoreCorrupt, StoreFull, StoreFault: as `fold_memory`.
    """
    from agentenv.snapshot import files
    from agentenv.vmm.qemu.joining import join

    path = Path(into)
    join([Path(each) for each in layers], path)
    files.sync([path, path.parent])
    return path.stat().st_size


def digests(files: list[list[str]]) -> list[str]:
    """The digest of each file, given by the paths of its parts.

    Raises:
        StoreCorrupt: one is missing. StoreFault: one cannot be read.
    """
    from agentenv.vmm.stored import digest_of

    return [digest_of(*map(Path, parts)) for parts in files]


WORK: dict[str, Callable[..., Any]] = {
    "fold_memory": fold_memory,
    "fold_disk": fold_disk,
    "digests": digests,
}

if __name__ == "__main__":
    os.umask(0o077)
    main(sys.argv[1])
