"""The archive that the kernel unpacks, read back by the program that defines its form."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from agentenv.guestimage import cpio


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    entries = [
        cpio.directory("bin"),
        cpio.file("bin/tool", b"#!tool\n", 0o755),
        cpio.file("empty", b""),
        cpio.file("odd", b"12345"),
        cpio.link("bin/same", "tool"),
    ]
    subprocess.run(["cpio", "--extract", "--quiet"], input=cpio.archive(entries), cwd=tmp_path, check=True)
    return tmp_path


def test_contents_and_modes_survive(unpacked: Path) -> None:
    assert (unpacked / "bin/tool").read_bytes() == b"#!tool\n"
    assert stat.S_IMODE((unpacked / "bin/tool").stat().st_mode) == 0o755
    assert (unpacked / "empty").read_bytes() == b""
    assert (unpacked / "odd").read_bytes() == b"12345"
    assert os.readlink(unpacked / "bin/same") == "tool"


def test_devices_are_listed_with_their_numbers() -> None:
    data = cpio.archive([cpio.directory("dev"), cpio.character_device("dev/console", 5, 1)])
    listing = subprocess.run(
        ["cpio", "--list", "--verbose", "--quiet"], input=data, capture_output=True, check=True
    ).stdout.decode()
    assert "crw-------" in listing
    assert "5,   1" in listing


def test_the_same_entries_give_the_same_bytes() -> None:
    assert cpio.archive([cpio.file("a", b"x")]) == cpio.archive([cpio.file("a", b"x")])


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 1_142_680])
def test_the_last_page_is_left_to_the_firmware(size: int) -> None:
    padded = cpio.clear_of_tables(b"x" * size)
    assert len(padded) % 4096 == 1
    assert padded.rstrip(b"\0") == b"x" * size
    assert len(padded) - size < 4097
