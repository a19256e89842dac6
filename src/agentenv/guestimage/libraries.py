"""The shared libraries and the loader of a program, as the host's own loader resolves them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import HostFault
from agentenv.guestimage.commands import run

_LINE = re.compile(r"^\s*(?:(?P<name>\S+) => )?(?P<path>/\S+) \(0x[0-9a-f]+\)$")
_MISSING = re.compile(r"^\s*(\S+) => not found$", re.MULTILINE)


@dataclass(frozen=True)
class Libraries:
    """Name by which a library is asked for → its file; and the loader, which loads them."""

    loader: Path
    files: dict[str, Path]


def of(programs: Iterable[Path]) -> Libraries:
    """What the programs (or shared objects) need, together.

    Raises:
        HostFault: a library is missing on the host, or the program has no loader (it is static).
    """
    loader, files = parse(run(["ldd", *programs], package="libc-bin"))
    if loader is None:
        raise HostFault(
            "the interpreter that runs aenv is linked statically, so it cannot be packed for guests",
            remedy="run aenv with the distribution's python3",
        )
    return Libraries(loader, dict(sorted(files.items())))


def parse(text: str) -> tuple[Path | None, dict[str, Path]]:
    """Loader and libraries from what ldd prints."""
    missing = _MISSING.findall(text)
    if missing:
        raise HostFault(f"libraries not found by the host's loader: {', '.join(missing)}")
    loader: Path | None = None
    files: dict[str, Path] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        path = Path(found["path"])
        if path.name.startswith("ld-linux") or path.name.startswith("ld-musl"):
            loader = path
        elif found["name"]:
            files[Path(found["name"]).name] = path
    return loader, files
