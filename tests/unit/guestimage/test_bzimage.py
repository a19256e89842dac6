"""Kernel images made here: the header, the payload in each compression, the note of a direct start."""

from __future__ import annotations

import gzip
import lzma
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.errors import InvalidRequest
from agentenv.guestimage import bzimage

RELEASE = "6.12.95+deb12-cloud-amd64"


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-q", "-c"], input=data, capture_output=True, check=True).stdout


def elf(*, pvh: bool = True) -> bytes:
    """A 64-bit ELF with one program header, of notes."""
    owner = struct.pack("<III", 4, 4, 18 if pvh else 12) + b"Xen\0" + b"\0\0\0\1"
    notes = struct.pack("<III", 6, 1, 1) + b"Linux\0\0\0" + b"a\0\0\0" + owner
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return header + struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(notes), len(notes), 4) + notes


def image(kernel: bytes, compress: Callable[[bytes], bytes]) -> bytes:
    """A bzImage of two sectors of set-up code and a payload."""
    payload = compress(kernel) + struct.pack("<I", len(kernel))
    head = bytearray(3 * 512)
    head[0x1F1] = 2
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", head, 0x20E, 0x300)
    struct.pack_into("<II", head, 0x248, 64, len(payload))
    head[0x500 : 0x500 + 40] = f"{RELEASE} (builder) #1".encode().ljust(40, b"\0")
    return bytes(head) + bytes(64) + payload + b"what follows"


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_the_release_is_read_from_the_header(tmp_path: Path) -> None:
    assert bzimage.release_of(write(tmp_path / "vmlinuz", image(elf(), gzip.compress))) == RELEASE


@pytest.mark.parametrize("data", [b"", b"short", bytes(70000)])
def test_another_file_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="is no Linux kernel image"):
        bzimage.release_of(write(tmp_path / "file", data))


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        bzimage.release_of(tmp_path / "nothing")


@pytest.mark.parametrize(
    "compress",
    [
        gzip.compress,
        lambda data: lzma.compress(data, format=lzma.FORMAT_XZ),
        pytest.param(zstd, marks=pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd")),
    ],
)
def test_the_kernel_is_taken_out(compress: Callable[[bytes], bytes]) -> None:
    assert bzimage.unpacked(image(elf(), compress)) == elf()


def test_one_that_cannot_start_directly_stays_in_its_image() -> None:
    assert bzimage.unpacked(image(elf(pvh=False), gzip.compress)) is None


def test_an_unknown_compression_is_left_to_the_kernel() -> None:
    assert bzimage.unpacked(image(elf(), lambda data: b"LZOP" + data)) is None


def test_what_is_no_program_cannot_start() -> None:
    assert not bzimage.starts_directly(b"text" * 100)
    assert bzimage.starts_directly(elf())
