"""Turning a directory into the read-only filesystem of the tools drive."""

from __future__ import annotations

from pathlib import Path

from agentenv.guestimage.commands import run

_BLOCK = 4096
# Plain: no journal and no checksums, since nothing ever writes to it.
_FEATURES = "none,extent,filetype,sparse_super,large_file,dir_index"


def make(tree: Path, image: Path) -> None:
    """Write `tree` as an ext4 filesystem to the new file `image`; every file in it belongs to root."""
    files = sorted(tree.rglob("*"))
    argv: list[str | Path] = ["mke2fs", "-q", "-F", "-t", "ext4", "-b", str(_BLOCK), "-m", "0"]
    argv += ["-O", _FEATURES, "-N", str(len(files) + 64), "-L", "agentenv"]
    argv += ["-E", "lazy_itable_init=0,root_owner=0:0", "-d", tree, image, f"{_blocks(files)}"]
    run(argv, package="e2fsprogs")


def _blocks(files: list[Path]) -> int:
    """Enough blocks for the files, their inodes and the tables, and some over."""
    data = sum(-(-path.stat().st_size // _BLOCK) + 1 for path in files if path.is_file())
    return data + 2 * len(files) + 512
