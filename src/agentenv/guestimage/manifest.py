"""What the guest directory holds, in `guest.json`: files by content, and the inputs they came from.

Files are named by their digest and never rewritten, so that a running node keeps what it booted
with; `kernel`, `initramfs` and `tools` are links to those in force.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "guest.json"
FORMAT = 1


@dataclass(frozen=True)
class Part:
    """One file: its place in the guest directory, SHA-256, what it was made from, and in words."""

    file: str
    digest: str
    key: str
    detail: str


@dataclass(frozen=True)
class Manifest:
    """The guest's parts, as they are in force."""

    busybox: Part
    kernel: Part
    initramfs: Part
    tools: Part
    release: str
    modules: str | None

    def links(self) -> dict[str, str]:
        """The plain name of each file that a machine boots with."""
        return {"kernel": self.kernel.file, "initramfs": self.initramfs.file, "tools": self.tools.file}


def read(directory: Path) -> Manifest | None:
    """The manifest of a guest directory; None where there is none, or one of another format."""
    try:
        content = json.loads((directory / NAME).read_text())
        if content.pop("format") != FORMAT:
            return None
        parts = {name: Part(**content.pop(name)) for name in ("busybox", "kernel", "initramfs", "tools")}
        return Manifest(**parts, release=content["release"], modules=content["modules"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write(directory: Path, manifest: Manifest) -> None:
    """Put a manifest in force, then the links by which people find the files."""
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2) + "\n"
    temporary = directory / f".{NAME}.new"
    temporary.write_text(text)
    temporary.replace(directory / NAME)
    for name, target in manifest.links().items():
        link = directory / f".{name}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        link.replace(directory / name)


def digest_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_files(paths: Iterable[Path], root: Path) -> str:
    """SHA-256 over the names (below `root`) and contents of files."""
    total = hashlib.sha256()
    for path in sorted(paths):
        data = path.read_bytes()
        total.update(os.fsencode(path.relative_to(root)) + b"\0%d\0" % len(data) + data)
    return total.hexdigest()


def key_of(*inputs: str) -> str:
    """One short text for several inputs."""
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()
