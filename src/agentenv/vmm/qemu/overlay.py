"""Empty qcow2 files, written directly: the header of an empty disk is 256 KiB of mostly zeros.

The format is QEMU's docs/interop/qcow2.rst, version 3, without a backing file's name: which layer lies
below is said when the disk is opened, so that layers can be moved.
"""

from __future__ import annotations

import os
import struct

from agentenv.errors import StoreCorrupt
from agentenv.vmm.machine import Layer, MachineSpec

MIB = 1 << 20

CLUSTER_BITS = 16
CLUSTER = 1 << CLUSTER_BITS
PER_TABLE = CLUSTER // 8  # entries of a table that fills a cluster
MAGIC = b"QFI\xfb"
HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")


def write_empty(descriptor: int, size: int) -> None:
    """Make an empty, writable file a qcow2 disk of `size` bytes that has no data of its own.

    Raises:
        OSError: the file cannot be written.
    """
    tables = -(-size // (CLUSTER * PER_TABLE))
    first_level = -(-tables // PER_TABLE)  # clusters of the first-level table
    used = 3 + first_level  # header, reference table, reference block
    os.ftruncate(descriptor, used * CLUSTER)
    os.pwrite(descriptor, header(size, tables, 3), 0)
    os.pwrite(descriptor, struct.pack(">Q", 2 * CLUSTER), CLUSTER)
    os.pwrite(descriptor, struct.pack(">H", 1) * used, 2 * CLUSTER)


def header(size: int, tables: int, first_level_at: int, reference_tables: int = 1) -> bytes:
    """The header of a disk of `size` bytes with so many second-level tables. `first_level_at` is the
    cluster where the first-level table begins; the reference table lies at cluster 1."""
    return HEADER.pack(
        MAGIC,
        3,  # version
        0,  # no backing file
        0,
        CLUSTER_BITS,
        size,
        0,  # not encrypted
        tables,
        first_level_at * CLUSTER,
        CLUSTER,  # the reference table
        reference_tables,  # clusters of it
        0,  # no internal snapshots
        0,
        0,  # no incompatible features
        0,  # no compatible features
        0,  # no autoclear features
        4,  # reference counts of 16 bits
        HEADER.size,
    )


def virtual_size(layer: Layer) -> int:
    """Bytes of the disk that a layer is.

    Raises:
        StoreCorrupt: it is said to be qcow2 and is not, or cannot be read.
    """
    try:
        if layer.format == "raw":
            return layer.path.stat().st_size
        with layer.path.open("rb") as file:
            start = file.read(32)
    except OSError as error:
        raise StoreCorrupt(f"the disk layer {layer.path} cannot be read: {error.strerror}") from error
    if len(start) < 32 or start[:4] != MAGIC:
        raise StoreCorrupt(f"the disk layer {layer.path} is not a qcow2 file")
    return int.from_bytes(start[24:32], "big")


def size_at_start(spec: MachineSpec, *, saved: bool) -> int:
    """Bytes of the disk that a machine begins with: as large as asked, or as it was when it was saved.

    Raises:
        StoreCorrupt: the layer to tell cannot be read.
    """
    return virtual_size(spec.layers[-1]) if saved and spec.layers else spec.disk_mib * MIB
