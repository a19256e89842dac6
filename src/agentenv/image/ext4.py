"""Makes an ext4 filesystem out of a directory.

Chosen for guests that boot often and live short: nothing is left to initialise after the first mount
(`lazy_itable_init=0`: on a sparse file zeroes cost nothing), a small journal, no space reserved for
root, and no checksums of metadata, which the layers under the disk have for everything and which
cost time per write where the processor is emulated. Group descriptors have room to grow the disk
online (`resize_inode`, on by default).
"""

from __future__ import annotations

import os
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import HostFault, HostIncapable, InvalidRequest, StoreFull
from agentenv.image.programs import Outcome, run
from agentenv.image.tree import host_faults

LABEL = "rootfs"
JOURNAL_MIB = 16
BYTES_PER_INODE = 16384
INODE_SLACK = 1.25
_EPOCH = "1704067200"  # a fixed time of creation, 2024-01-01, so that equal trees give equal superblocks
_NAMESPACE = uuid.UUID("6f3f0f0e-5a0e-4c57-9d0c-5c0a3c1f8a51")


@dataclass(frozen=True)
class Usage:
    """What a tree takes: bytes of file blocks, and entries."""

    bytes: int
    entries: int


def filesystem_id(digest: str) -> uuid.UUID:
    """The filesystem's UUID, the same for the same source."""
    return uuid.uuid5(_NAMESPACE, digest)


def usage(root: Path) -> Usage:
    """Count a tree; hard links count once for bytes."""
    total, entries = 0, 1
    pending = [str(root)]
    while pending:
        with os.scandir(pending.pop()) as directory:
            for entry in directory:
                entries += 1
                status = entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                    total += status.st_size
                elif stat.S_ISREG(status.st_mode):
                    total += status.st_blocks * 512 // status.st_nlink
    return Usage(total, entries)


def needed_mib(used: Usage, free_mib: int = 256) -> int:
    """A disk size in MiB that holds the tree with room to work: a tenth more, and `free_mib`."""
    metadata = used.entries * 1024 + (JOURNAL_MIB << 20)
    mib = -(-(used.bytes + metadata) * 11 // 10 >> 20) + free_mib
    return -(-mib // 256) * 256


def arguments(root: Path, out: Path, disk_mib: int, used: Usage, identity: uuid.UUID) -> list[str]:
    """The command line of mkfs.ext4."""
    inodes = max((disk_mib << 20) // BYTES_PER_INODE, int(used.entries * INODE_SLACK) + 1024)
    return [
        *("mkfs.ext4", "-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-N", str(inodes), "-m", "0"),
        *("-L", LABEL, "-U", str(identity)),
        *("-O", "^metadata_csum,^64bit,^orphan_file,has_journal,dir_index,ext_attr"),
        *("-J", f"size={JOURNAL_MIB}"),
        *("-E", f"lazy_itable_init=0,lazy_journal_init=1,hash_seed={identity},root_owner=0:0"),
        *("-d", str(root), str(out), f"{disk_mib}M"),
    ]


async def make(root: Path, out: Path, disk_mib: int, digest: str, used: Usage) -> None:
    """Write the filesystem of `root`, which takes `used`, to the new sparse file `out` of `disk_mib` MiB.

    Raises:
        InvalidRequest: the tree does not fit.
        StoreFull: the host's disk is full.
        HostIncapable: e2fsprogs is missing.
        HostFault: mkfs.ext4 failed otherwise.
    """
    environment = {**os.environ, "E2FSPROGS_FAKE_TIME": _EPOCH}
    outcome = await run(arguments(root, out, disk_mib, used, filesystem_id(digest)), environment)
    check(outcome, disk_mib)
    await _keep_root_attributes(root, out)


def check(outcome: Outcome, disk_mib: int) -> None:
    """Raise what mkfs.ext4's outcome means, if it failed."""
    if outcome.status == 0:
        return
    if outcome.status is None:
        raise HostIncapable("there is no mkfs.ext4", remedy="apt-get install e2fsprogs")
    text = outcome.stderr
    if "No space left on device" in text:
        raise StoreFull("no space left for the root filesystem", remedy="free space in the data directory")
    if "Could not allocate" in text or "too small" in text or "No free space" in text:
        raise InvalidRequest(
            f"the image does not fit a disk of {disk_mib} MiB", remedy="ask for a larger disk"
        )
    raise HostFault(f"mkfs.ext4 failed ({outcome.status}): {text.strip()[-400:]}")


async def _keep_root_attributes(root: Path, out: Path) -> None:
    """mkfs.ext4 before 1.47.1 copies all but the attributes of the top directory itself."""
    status = root.stat()
    commands = [
        f"sif / mode 0{status.st_mode:o}",
        f"sif / uid {status.st_uid}",
        f"sif / gid {status.st_gid}",
        f"sif / mtime @{int(status.st_mtime)}",
    ]
    script = out.with_name(f"{out.name}.debugfs")
    try:
        with host_faults(str(script)):
            script.write_text("\n".join(commands) + "\n")
        outcome = await run(["debugfs", "-w", "-f", str(script), str(out)])
    finally:
        script.unlink(missing_ok=True)
    if outcome.status != 0:
        raise HostFault(
            f"debugfs failed: {outcome.stderr.strip()[-400:]}", remedy="apt-get install e2fsprogs"
        )


async def grow(source: Path, out: Path, disk_mib: int) -> None:
    """Write a copy of a filesystem with more room, `disk_mib` MiB in all, to the new sparse file `out`.

    Raises:
        StoreFull: the host's disk is full. HostIncapable, HostFault: a program is missing, or failed.
    """
    working = f"{out}.growing"
    commands = (
        ("cp", "--sparse=always", "--reflink=auto", "--no-preserve=mode", str(source), working),
        ("truncate", f"--size={disk_mib}M", working),
        ("resize2fs", working),
        # Without the tables that it writes and that hold nothing, 16 MiB for each GiB.
        ("cp", "--sparse=always", "--reflink=never", working, str(out)),
        ("rm", working),
    )
    environment = {**os.environ, "E2FSPROGS_FAKE_TIME": _EPOCH}
    for command in commands:
        outcome = await run(command, environment)
        if outcome.status is None:
            raise HostIncapable(f"there is no {command[0]}", remedy="apt-get install e2fsprogs")
        if "No space left on device" in outcome.stderr:
            raise StoreFull(
                "no space left for the root filesystem", remedy="free space in the data directory"
            )
        if outcome.status != 0:
            raise HostFault(f"{command[0]} failed ({outcome.status}): {outcome.stderr.strip()[-400:]}")


def seal(path: Path) -> int:
    """Make the file read-only and durable; returns the bytes it takes."""
    path.chmod(0o444)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_blocks * 512
    except OSError as error:
        raise HostFault(f"{path} cannot be written out: {error}") from error
    finally:
        os.close(descriptor)
