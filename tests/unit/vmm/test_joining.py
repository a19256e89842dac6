"""Disk layers made one, judged by QEMU's own tools: what is read stays the same, and what shows through."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from agentenv.errors import StoreCorrupt
from agentenv.vmm.qemu.joining import join
from agentenv.vmm.qemu.overlay import MIB, write_empty

needs_qemu_img = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="qemu-img is not installed")


def made(path: Path, size: int) -> Path:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        write_empty(descriptor, size)
    finally:
        os.close(descriptor)
    return path


def stack(base: Path, *layers: Path) -> str:
    """The disk that layers are upon a raw base, as QEMU's tools take it."""
    node: dict[str, object] = {"driver": "raw", "file": {"driver": "file", "filename": str(base)}}
    for layer in layers:
        file = {"driver": "file", "filename": str(layer), "discard": "unmap"}
        node = {"driver": "qcow2", "file": file, "backing": node, "discard": "unmap"}
    return f"json:{json.dumps(node)}"


def qemu(*words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr
    return done.stdout


def qemu_io(disk: str, *script: str) -> None:
    qemu("qemu-io", "-d", "unmap", *(word for line in script for word in ("-c", line)), disk)


def same(base: Path, layers: list[Path], joined: list[Path]) -> None:
    assert "identical" in qemu("qemu-img", "compare", stack(base, *layers), stack(base, *joined))


def checked(path: Path) -> None:
    found = json.loads(qemu("qemu-img", "check", "--output=json", path))
    assert (found["check-errors"], found.get("leaks", 0), found.get("corruptions", 0)) == (0, 0, 0)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.raw"
    path.write_bytes(b"\xaa" * (8 * MIB))
    return path


@needs_qemu_img
def test_the_newest_counts_and_the_rest_shows_through(base: Path, tmp_path: Path) -> None:
    layers: list[Path] = []
    scripts = [
        ["write -P 1 0 300k", "write -P 1 2M 64k", "write -P 1 5M 1M"],
        ["write -P 2 100k 10k", "discard 2M 64k", "write -z 5M 512k"],
        [],
        ["write -P 3 5500k 100k", "write -P 3 7M 1k"],
    ]
    for number, script in enumerate(scripts):
        layers.append(made(tmp_path / f"layer{number}", 8 * MIB))
        qemu_io(stack(base, *layers), *script)
    joined = tmp_path / "joined"
    join(layers, joined)
    checked(joined)
    same(base, layers, [joined])
    # Zeros that hide the base are as much a layer's as data; what it does not have is not its.
    disk = stack(base, joined)
    qemu_io(disk, "read -P 0 2M 64k", "read -P 0 5M 300k", "read -P 3 5500k 100k", "read -P 0xaa 1M 512k")
    # And it is like any other layer: it can be joined again, and written upon.
    again = tmp_path / "again"
    join([joined], again)
    top = made(tmp_path / "top", 8 * MIB)
    qemu_io(stack(base, again, top), "write -P 9 0 1M", "read -P 9 0 1M", "read -P 3 7M 1k")
    assert again.read_bytes() == joined.read_bytes()


@needs_qemu_img
@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_written_is_read(base: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    layers: list[Path] = []
    for number in range(chance.randint(2, 8)):
        layers.append(made(tmp_path / f"layer{number}", 8 * MIB))
        script = []
        for _ in range(chance.randint(0, 12)):
            at, length = chance.randrange(0, 8 * MIB - 300_000, 512), chance.randrange(512, 300_000, 512)
            verb = chance.choice([f"write -P {chance.randint(1, 255)}", "write -z", "write -z -u", "discard"])
            script.append(f"{verb} {at} {length}")
        qemu_io(stack(base, *layers), *script)
    begin = chance.randrange(len(layers) - 1)
    joined = tmp_path / "joined"
    join(layers[begin:], joined)
    checked(joined)
    same(base, layers, [*layers[:begin], joined])


@needs_qemu_img
def test_a_large_disk_that_grew(base: Path, tmp_path: Path) -> None:
    """Many tables, counts that take more than one block, and layers of different sizes."""
    small, large = made(tmp_path / "small", 1024 * MIB), made(tmp_path / "large", 3 << 30)
    qemu_io(stack(base, small), "write -P 1 1000M 1M", "write -z 600M 16M")
    qemu_io(stack(base, small, large), "write -P 2 2900M 1M", "write -P 3 1000M 1k")
    joined = tmp_path / "joined"
    join([small, large], joined)
    checked(joined)
    same(base, [small, large], [joined])


def test_an_empty_one_stays_as_it_is_made(tmp_path: Path) -> None:
    empty = made(tmp_path / "empty", 100 * MIB)
    join([empty, empty], tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == empty.read_bytes()


@pytest.mark.parametrize(
    ("at", "content", "said"),
    [
        (0, b"QFI?", "not a qcow2"),
        (4, b"\0\0\0\2", "form"),
        (8, b"\0\0\0\0\0\0\1\0", "form"),
        (72, b"\0\0\0\0\0\0\0\1", "form"),
        (24, b"\0\0\0\0\0\1\0\0", "smaller"),
    ],
)
def test_other_forms_are_refused_and_nothing_is_left(
    tmp_path: Path, at: int, content: bytes, said: str
) -> None:
    below, top = made(tmp_path / "below", MIB), made(tmp_path / "top", MIB)
    with top.open("r+b") as file:
        file.seek(at)
        file.write(content)
    with pytest.raises(StoreCorrupt, match=said):
        join([below, top], tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


def test_a_layer_cut_short_is_told(tmp_path: Path) -> None:
    layer = made(tmp_path / "layer", MIB)
    os.truncate(layer, 3 * 65536)
    with pytest.raises(StoreCorrupt, match="cut short"):
        join([layer], tmp_path / "joined")
    with pytest.raises(StoreCorrupt, match="missing"):
        join([tmp_path / "none"], tmp_path / "joined")
