"""Turning a directory into the read-only filesystem of the tools drive.

Plain ext4, which distributions' kernels have built in and the root disk's mount needs anyway: a
compressed filesystem would be smaller on the host, and cost the guest a module to load and the
decompression under emulation.
"""

from __future__ import annotations

import os
from pathlib import Path

from agentenv.guestimage.commands import run

_BLOCK = 4096
# No journal and no checksums, since nothing ever writes to it.
_FEATURES = "none,extent,filetype,sparse_super,large_file,dir_index"
# The same tree makes the same bytes: nothing of the moment or of chance goes in.
_UUID = "a9e27e0d-0000-4000-8000-000000000001"
_TIME = 1


def make(tree: Path, image: Path) -> None:
    """Write `tree` as an ext4 filesystem to the new file `image`; every file in it belongs to root."""
    files = sorted(tree.rglob("*"))
    for path in (tree, *files):
        os.utime(path, (_TIME, _TIME))
    argv: list[str | Path] = ["mke2fs", "-q", "-F", "-t", "ext4", "-b", str(_BLOCK), "-I", "128", "-m", "0"]
    argv += ["-O", _FEATURES, "-N", str(len(files) + 64), "-L", "agentenv", "-U", _UUID]
    argv += ["-E", f"hash_seed={_UUID},lazy_itable_init=0,root_owner=0:0"]
    run([*argv, "-d", tree, image, str(_blocks(files))], package="e2fsprogs", env=_environment())
    run(
        ["debugfs", "-w", "-f", "-", image],
        package="e2fsprogs",
        env=_environment(),
        stdin=_owners(tree, files),
    )


def _blocks(files: list[Path]) -> int:
    """Enough blocks for the files, their inodes and the tables, and some over."""
    data = sum(-(-path.stat().st_size // _BLOCK) + 1 for path in files if path.is_file())
    return data + 2 * len(files) + 512


def _owners(tree: Path, files: list[Path]) -> str:
    """What mke2fs takes from the directory and nobody can set there, as commands of debugfs."""
    names = ["/", *(f"/{path.relative_to(tree)}" for path in files), "/lost+found"]
    fields = (("uid", 0), ("gid", 0), ("ctime", f"@{_TIME}"))
    return "".join(f'sif "{name}" {field} {value}\n' for name in names for field, value in fields)


def _environment() -> dict[str, str]:
    return {**os.environ, "E2FSPROGS_FAKE_TIME": str(_TIME), "LC_ALL": "C"}
