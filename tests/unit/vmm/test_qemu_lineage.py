"""What a machine consists of, as it is noted and found again."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.vmm.machine import Drive, GuestFiles, Layer, MachineSpec, MemoryImage, Nic
from agentenv.vmm.qemu.lineage import Disk, Lineage, disk_file, disks_of, memory_file

GUEST = GuestFiles(Path("/g/vmlinuz"), Path("/g/initramfs"), Path("/g/tools"))
LAYERS = (Layer(Path("/i/base.ext4"), "raw"), Layer(Path("/i/one.qcow2"), "qcow2"))
SPEC = MachineSpec("m1", 1, 128, 256, GUEST, LAYERS, Nic(Path("/n/a"), "tap0", "02:fc:00:00:00:05"), 70001)
IMAGE = MemoryImage(Path("/s/a/memory"), (Path("/s/b/memory"), Path("/s/c/memory")))


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    for depth in (2, 3):
        disk_file(tmp_path, depth).touch()
    return Lineage(tmp_path, LAYERS, (Path("/s/c/disk"),), IMAGE, ran=True)


def noted(lineage: Lineage, node: str) -> Lineage:
    detail = json.loads(json.dumps({"room": "vmm", "pid": 7, **lineage.detail()}))
    return Lineage.noted(lineage.directory, SPEC, detail, [node])


def test_the_live_layer_lies_upon_all_others(lineage: Lineage) -> None:
    assert lineage.depth == 3
    assert lineage.disk == disk_file(lineage.directory, 3)
    assert Lineage(lineage.directory, ()).disk == disk_file(lineage.directory, 0)


@pytest.mark.parametrize("image", [IMAGE, MemoryImage(Path("/s/a/memory")), None])
def test_what_is_noted_is_found_again(lineage: Lineage, image: MemoryImage | None) -> None:
    made = replace(lineage, image=image)
    assert noted(made, "layer3") == made


def test_a_layer_sealed_without_a_note_is_the_machines_own(lineage: Lineage) -> None:
    disk_file(lineage.directory, 4).touch()
    found = noted(lineage, "layer4")
    assert found.sealed == (Path("/s/c/disk"), disk_file(lineage.directory, 3))
    assert found.disk == disk_file(lineage.directory, 4)


def test_a_node_that_no_file_belongs_to_is_an_error(lineage: Lineage) -> None:
    with pytest.raises(ValueError, match="layer9"):
        noted(lineage, "layer9")


def test_a_note_of_an_older_program_is_of_a_booted_machine(tmp_path: Path) -> None:
    found = Lineage.noted(tmp_path, SPEC, {"room": "vmm", "pid": 7}, ["layer2"])
    assert found == Lineage(tmp_path, LAYERS, (), None, ran=True)


def test_files_with_another_name_are_shared(lineage: Lineage, tmp_path: Path) -> None:
    assert not lineage.shared()
    os.link(lineage.disk, tmp_path / "capture")
    assert lineage.shared()
    (tmp_path / "capture").unlink()
    booted = replace(lineage, image=None)
    memory_file(tmp_path).touch()
    assert not booted.shared()
    os.link(memory_file(tmp_path), tmp_path / "capture")
    assert booted.shared()
    assert not lineage.shared()


def test_a_drive_that_is_written_is_followed_like_the_root_disk(tmp_path: Path) -> None:
    spec = replace(SPEC, drives=(Drive(LAYERS[:1]), Drive(LAYERS[:1], True, 512)))
    root, drive = disks_of(tmp_path, spec)
    assert (root.node(), drive.node(), drive.node(1)) == ("layer2", "drive1layer1", "drive1layer2")
    assert (root.device, drive.device) == ("drive-root", "drive-spare1")
    for disk in (root, drive):
        disk.file().touch()
    before = Lineage(tmp_path, LAYERS, image=IMAGE, drives=(drive,))
    sealed = [replace(disk, sealed=(Path(f"/s/d/{disk.name}"),)) for disk in before.disks]
    after = before.with_disks(sealed)
    assert after.stands_on >= {Path("/s/d/disk"), Path("/s/d/drive1"), LAYERS[0].path}
    detail = json.loads(json.dumps(after.detail()))
    nodes = [disk.node() for disk in after.disks]
    assert Lineage.noted(tmp_path, spec, detail, nodes) == replace(after, ran=False)
    # A note that was not written any more: the layers are the machine's own.
    found = Lineage.noted(tmp_path, spec, {**detail, "drives": {}}, nodes)
    assert found.drives == (Disk(tmp_path, LAYERS[:1], (drive.file(),), 1),)
    os.link(drive.file(), tmp_path / "capture")
    assert before.shared()
