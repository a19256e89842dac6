"""Taking a kernel out of its bzImage, which saves the guest the time of doing so itself.

A distribution's bzImage is a small program with the compressed kernel, an ELF file, inside. QEMU can
start the ELF file directly where it was built with CONFIG_PVH, which is two seconds sooner under
software emulation; Firecracker takes nothing else.
"""

from __future__ import annotations

import gzip
import lzma
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

from agentenv.errors import InvalidRequest

_REMEDY = "set AENV_KERNEL to a bzImage"
_SECTOR = 512
_PT_NOTE = 4
_PVH_ENTRY = 18  # XEN_ELFNOTE_PHYS32_ENTRY: where a PVH guest begins


def release_of(image: Path) -> str:
    """The release that a bzImage says it is.

    Where it is, by the kernel's Documentation/arch/x86/boot.rst: `HdrS` at 0x202, and at 0x20E
    the offset, less 0x200, of a text that begins with the release.

    Raises:
        InvalidRequest: it cannot be read, or is no bzImage.
    """
    try:
        with image.open("rb") as stream:
            head = stream.read(65536)
    except OSError as error:
        raise InvalidRequest(f"guest kernel {image}: {error.strerror}", remedy=_REMEDY) from None
    if head[0x202:0x206] != b"HdrS":
        raise InvalidRequest(f"{image} is no Linux kernel image", remedy=_REMEDY)
    start = struct.unpack_from("<H", head, 0x20E)[0] + 0x200
    return head[start : start + 256].partition(b"\0")[0].split()[0].decode()


def unpacked(image: bytes) -> bytes | None:
    """The kernel inside, as an ELF file that can be started directly; None where it cannot be had.

    The payload's place is in the header too: at 0x1F1 the sectors of the set-up code, at 0x248 the
    payload's offset after it, and its length, of which the last four bytes are the size of the kernel.
    """
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    begin = (sectors + 1) * _SECTOR + offset
    payload = image[begin : begin + length - 4]
    for magic, decompress in _FORMATS.items():
        if payload.startswith(magic):
            kernel = decompress(payload)
            return kernel if kernel and starts_directly(kernel) else None
    return None


def starts_directly(kernel: bytes) -> bool:
    """Whether an ELF kernel has the note that says where a PVH guest begins."""
    if kernel[:5] != b"\x7fELF\x02":
        return False
    (table,) = struct.unpack_from("<Q", kernel, 32)
    size, count = struct.unpack_from("<HH", kernel, 54)
    for index in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", kernel, table + index * size)
        if kind == _PT_NOTE and _has_note(kernel[offset : offset + length], b"Xen\0", _PVH_ENTRY):
            return True
    return False


def _has_note(notes: bytes, owner: bytes, wanted: int) -> bool:
    position = 0
    while position + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, position)
        name = notes[position + 12 : position + 12 + name_size]
        if kind == wanted and name == owner:
            return True
        position += 12 + (name_size + 3 & ~3) + (size + 3 & ~3)
    return False


def _xz(payload: bytes) -> bytes:
    return lzma.LZMADecompressor().decompress(payload)


def _zstd(payload: bytes) -> bytes:
    """Through the program: the standard library reads zstd only from 3.14 on."""
    try:
        return subprocess.run(
            ["zstd", "-q", "-d", "-c"], input=payload, capture_output=True, check=False
        ).stdout
    except FileNotFoundError:
        return b""  # the kernel unpacks itself, then


_FORMATS: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x28\xb5\x2f\xfd": _zstd,
    b"\xfd7zXZ\0": _xz,
    b"\x1f\x8b": gzip.decompress,
}
