"""Empty qcow2 files, judged by QEMU's own tool."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agentenv.errors import StoreCorrupt
from agentenv.vmm.machine import Layer
from agentenv.vmm.qemu import overlay
from agentenv.vmm.qemu.overlay import MIB, virtual_size, write_empty

needs_qemu_img = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="qemu-img is not installed")


def made(path: Path, size: int) -> Path:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        write_empty(descriptor, size)
    finally:
        os.close(descriptor)
    return path


def qemu_img(*words: str | Path) -> dict[str, object]:
    done = subprocess.run(["qemu-img", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parsed: dict[str, object] = json.loads(done.stdout or "{}")
    return parsed


@needs_qemu_img
@pytest.mark.parametrize("size", [512, MIB, 512 * MIB, 512 * MIB + 512, 2048 * MIB, 100_000 * MIB, 8 << 40])
def test_qemu_finds_nothing_wrong(tmp_path: Path, size: int) -> None:
    path = made(tmp_path / "disk.qcow2", size)
    checked = qemu_img("check", "--output=json", path)
    assert checked.get("check-errors") == 0
    assert not {"leaks", "corruptions"} & checked.keys()
    info = qemu_img("info", "--output=json", path)
    assert (info["format"], info["virtual-size"]) == ("qcow2", size)
    assert "backing-filename" not in info
    assert virtual_size(Layer(path, "qcow2")) == size


@needs_qemu_img
def test_what_is_written_over_a_base_is_read_and_the_rest_shows_through(tmp_path: Path) -> None:
    base = tmp_path / "base.raw"
    base.write_bytes(b"\xaa" * MIB)
    disk = made(tmp_path / "disk.qcow2", 4 * MIB)
    opened = {
        "driver": "qcow2",
        "file": {"driver": "file", "filename": str(disk)},
        "backing": {"driver": "raw", "file": {"driver": "file", "filename": str(base)}},
    }
    script = ["write -P 0x55 65000 2000", "read -P 0xaa 0 65000", "read -P 0x55 65000 2000"]
    script += ["read -P 0xaa 67000 900000", "read -P 0 1M 3M"]
    commands = [word for line in script for word in ("-c", line)]
    done = subprocess.run(
        ["qemu-io", *commands, f"json:{json.dumps(opened)}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout
    assert qemu_img("check", "--output=json", disk).get("check-errors") == 0
    assert base.read_bytes() == b"\xaa" * MIB


def test_an_empty_overlay_takes_little_space(tmp_path: Path) -> None:
    path = made(tmp_path / "disk.qcow2", 2048 * MIB)
    assert path.stat().st_blocks * 512 <= 65536


def test_the_size_of_a_raw_layer_is_its_length(tmp_path: Path) -> None:
    path = tmp_path / "base.raw"
    path.write_bytes(bytes(4096))
    assert virtual_size(Layer(path, "raw")) == 4096


@pytest.mark.parametrize("content", [b"", b"QFI\xfb", b"not a disk at all" * 10])
def test_what_is_not_qcow2_is_corrupt(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "layer"
    path.write_bytes(content)
    with pytest.raises(StoreCorrupt, match="not a qcow2"):
        virtual_size(Layer(path, "qcow2"))


def test_a_missing_layer_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreCorrupt, match="No such file"):
        virtual_size(Layer(tmp_path / "none", "qcow2"))


def test_the_header_has_the_length_that_the_format_says() -> None:
    assert overlay.HEADER.size == 104
