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

_CLUSTER_BITS = 16
_CLUSTER = 1 << _CLUSTER_BITS
_MAGIC = b"QFI\xfb"
_HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")


def write_empty(descriptor: int, size: int) -> None:
    """Make an empty, writable file a qcow2 disk of `size` bytes that has no data of its own.

    Raises:
        OSError: the file cannot be written.
    """
    entries_per_table = _CLUSTER // 8
    tables = -(-size // (_CLUSTER * entries_per_table))
    first_level = -(-tables * 8 // _CLUSTER)  # clusters of the first-level table
    used = 3 + first_level  # header, reference table, reference block
    header = _HEADER.pack(
        _MAGIC,
        3,  # version
        0,  # no backing file
        0,
        _CLUSTER_BITS,
        size,
        0,  # not encrypted
        tables,
        3 * _CLUSTER,  # the first-level table comes last
        _CLUSTER,  # the reference table
        1,  # of one cluster
        0,  # no internal snapshots
        0,
        0,  # no incompatible features
        0,  # no compatible features
        0,  # no autoclear features
        4,  # reference counts of 16 bits
        _HEADER.size,
    )
    os.ftruncate(descriptor, used * _CLUSTER)
    os.pwrite(descriptor, header, 0)
    os.pwrite(descriptor, struct.pack(">Q", 2 * _CLUSTER), _CLUSTER)
    os.pwrite(descriptor, struct.pack(">H", 1) * used, 2 * _CLUSTER)


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
    if len(start) < 32 or start[:4] != _MAGIC:
        raise StoreCorrupt(f"the disk layer {layer.path} is not a qcow2 file")
    return int.from_bytes(start[24:32], "big")


def size_at_start(spec: MachineSpec, *, saved: bool) -> int:
    """Bytes of the disk that a machine begins with: as large as asked, or as it was when it was saved.

    Raises:
        StoreCorrupt: the layer to tell cannot be read.
    """
    return virtual_size(spec.layers[-1]) if saved and spec.layers else spec.disk_mib * MIB
