"""Sandboxes of other sizes than their template's, of images, and with drives beside."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agentenv.errors import CapacityExceeded, InvalidRequest, NotFound, NotImplementedYet
from agentenv.image import eviction
from agentenv.sandbox.admission import Budget, Need
from agentenv.sandbox.agent import Identity
from agentenv.sandbox.drives import new_drive
from agentenv.sandbox.records import Sandbox
from agentenv.sandbox.requests import Key, NewSandbox, Shape
from agentenv.sandbox.service import Sandboxes
from agentenv.snapshot.records import Resources, Snapshot
from support.sandbox_parts import MemoryNode, quiet, wanted

DATA = new_drive("data", "debian:12")
WORK = new_drive("work", "debian:12", read_only=False, disk_mib=4096)


def of_image(image: str = "python:3.12", **given: Any) -> NewSandbox:
    return NewSandbox("", 300, image=image, **given)


async def created(node: MemoryNode, request: NewSandbox) -> Sandbox:
    return (await node.service.create(request)).sandbox


def first_ones(service: Sandboxes) -> list[Snapshot]:
    return list(service.snapshots.of_kinds(("template",)))


def drive_files(snapshot: Snapshot) -> list[list[str]]:
    return [[layer.path.rpartition("/")[2] for layer in drive.disk] for drive in snapshot.drives]


# Sizes


async def test_another_size_is_booted_once_and_restored_from_then_on(node: MemoryNode) -> None:
    larger = wanted(shape=Shape(vcpus=2, memory_mib=1024))
    first, second = await asyncio.gather(created(node, larger), created(node, larger))
    assert node.steps.passed.count("boot") == 1
    assert first.resources == second.resources == Resources(2, 1024, 2048)
    assert {each.resources for each in first_ones(node.service)} == {Resources(1, 512, 2048), first.resources}
    assert node.hypervisor.machines[first.id].spec.memory_mib == 1024
    usual = await created(node, wanted(shape=Shape(vcpus=1)))
    assert usual.resources == Resources(1, 512, 2048)
    assert node.steps.passed.count("boot") == 1


async def test_a_larger_disk_needs_no_boot(node: MemoryNode) -> None:
    sandbox = await created(node, wanted(shape=Shape(disk_mib=4096)))
    assert "boot" not in node.steps.passed
    assert node.hypervisor.machines[sandbox.id].spec.disk_mib == 4096
    assert node.identities[-1].disk_mib == 4096
    await node.service.pause(sandbox.id)
    await node.service.connect(sandbox.id, 300)
    assert node.identities[-1] == Identity()
    assert node.hypervisor.machines[sandbox.id].spec.disk_mib == 4096
    await node.service.rollback(sandbox.id)
    assert node.identities[-1].disk_mib == 4096
    with pytest.raises(InvalidRequest, match="only grow"):
        await node.service.create(wanted(shape=Shape(disk_mib=1024)))


async def test_another_size_than_a_checkpoints_boots_from_its_disk(node: MemoryNode) -> None:
    parent = await created(node, wanted())
    checkpoint, _ = await node.service.checkpoint(parent.id)
    node.steps.passed.clear()
    child = await created(node, wanted(checkpoint.id, shape=Shape(memory_mib=1024)))
    assert "boot" in node.steps.passed and "restore" not in node.steps.passed
    assert (child.memory_mib, child.fingerprint and child.fingerprint["memory_mib"]) == (1024, "1024")


async def test_other_sizes_go_with_their_template(node: MemoryNode) -> None:
    sandbox = await created(node, wanted(shape=Shape(memory_mib=1024)))
    assert len(first_ones(node.service)) == 2
    await node.service.kill(sandbox.id)
    node.service.template_deleted("tbase")
    assert first_ones(node.service) == []


async def test_other_sizes_that_nobody_uses_go(node: MemoryNode) -> None:
    keep_s = node.settings.shape_keep_s
    for memory_mib in (1024, 1536):
        await node.service.kill((await created(node, wanted(shape=Shape(memory_mib=memory_mib)))).id)
    node.clock.jump(keep_s * 0.9)
    await node.service.kill((await created(node, wanted(shape=Shape(memory_mib=1024)))).id)
    node.clock.jump(keep_s * 0.2)
    node.service.drop_outdated()
    assert sorted(each.resources.memory_mib for each in first_ones(node.service)) == [512, 1024]


# Images


async def test_a_sandbox_of_an_image_is_booted_once(node: MemoryNode) -> None:
    first = await created(node, of_image())
    second = await created(node, of_image(env={"A": "b"}))
    assert node.images.asked == ["docker:python:3.12"] * 2
    assert node.images.held == []
    assert node.steps.passed.count("boot") == 1
    assert (first.template.name, first.memory_mib, first.disk_mib) == (
        "python:3.12", node.settings.memory_mib, 1024,
    )  # fmt: skip
    assert second.guest.env == {"FROM_IMAGE": "1", "A": "b"}
    await created(node, of_image(shape=Shape(vcpus=2, memory_mib=1024, disk_mib=2048)))
    assert node.steps.passed.count("boot") == 2
    assert node.identities[-1].disk_mib == 2048
    node.service.drop_outdated()
    assert len(first_ones(node.service)) == 3
    node.clock.jump(node.settings.shape_keep_s + 1)
    node.service.drop_outdated()
    assert [each.template.name for each in first_ones(node.service)] == ["base"]


async def test_an_image_that_there_is_not_is_the_callers_mistake(node: MemoryNode) -> None:
    with pytest.raises(InvalidRequest, match="missing"):
        await node.service.create(of_image("missing:1"))
    with pytest.raises(InvalidRequest, match="no image of a registry"):
        await node.service.create(of_image("rootfs:/etc"))
    with pytest.raises(InvalidRequest, match="only grow"):
        await node.service.create(of_image(shape=Shape(disk_mib=512)))
    with pytest.raises(NotFound):
        await node.service.create(wanted("nothing", drives=(DATA,)))
    assert node.records.unended() == []


async def test_the_same_key_meanwhile_is_the_same_sandbox(node: MemoryNode) -> None:
    node.steps.hold("image")
    requests = [asyncio.create_task(node.service.create(of_image(), Key("k", "r"))) for _ in range(2)]
    await node.steps.reached("image")
    await quiet()
    node.steps.let_go("image")
    first, second = await asyncio.gather(*requests)
    assert first.sandbox.id == second.sandbox.id
    assert node.service.count == 1


# Drives


async def test_drives_are_mounted_once_and_kept_through_a_life(node: MemoryNode) -> None:
    sandbox = await created(node, wanted(drives=(DATA, WORK)))
    machine = node.hypervisor.machines[sandbox.id]
    read, written = machine.spec.drives
    assert (read.writable, written.writable, written.disk_mib) == (False, True, 4096)
    assert read.layers == written.layers
    assert {place: drive.id for place, drive in node.identities[-1].drives.items()} == {0: "data", 1: "work"}
    checkpoint, _ = await node.service.checkpoint(sandbox.id)
    image = read.layers[0].path.name
    assert drive_files(checkpoint) == [[image], [image, "drive1"]]
    assert {part for part in checkpoint.parts() if "cache" in part} == {checkpoint.drives[0].disk[0].path}
    await node.service.pause(sandbox.id)
    paused = node.service.snapshots.recorded(node.service.get(sandbox.id).snapshot or "")
    assert paused is not None and drive_files(paused) == [[image], [image, "drive1", "drive1"]]
    await node.service.connect(sandbox.id, 300)
    assert node.identities[-1].drives == {}
    assert [len(each.layers) for each in node.hypervisor.machines[sandbox.id].spec.drives] == [1, 3]
    await node.service.rollback(sandbox.id, checkpoint.id)
    assert node.identities[-1].drives == {}
    assert [len(each.layers) for each in node.hypervisor.machines[sandbox.id].spec.drives] == [1, 2]
    # Back to its start it has them as they were, and to mount anew.
    await node.service.rollback(sandbox.id)
    assert len(node.identities[-1].drives) == 2
    assert [len(each.layers) for each in node.hypervisor.machines[sandbox.id].spec.drives] == [1, 1]


async def test_images_of_drives_stay_in_the_cache(node: MemoryNode) -> None:
    sandbox = await created(node, wanted(drives=(DATA, WORK)))
    (image,) = eviction.named_in_records(node.database)
    assert sandbox.drives[0].disk[0].path == f"images/cache/{image}"
    await node.service.pause(sandbox.id)
    assert eviction.named_in_records(node.database) == {image}
    paused = node.service.get(sandbox.id)
    assert paused.snapshot is not None
    assert image in str(node.service.snapshots.get(paused.snapshot).parts())


async def test_a_start_from_the_disk_mounts_them_again(node: MemoryNode) -> None:
    sandbox = await created(node, wanted(drives=(DATA, WORK)))
    await node.service.pause(sandbox.id, memory=False)
    await node.service.connect(sandbox.id, 300)
    assert len(node.identities[-1].drives) == 2
    assert [len(each.layers) for each in node.hypervisor.machines[sandbox.id].spec.drives] == [1, 2]


async def test_children_have_layers_of_their_own(node: MemoryNode) -> None:
    sandbox = await created(node, wanted(drives=(WORK,)))
    (child,) = await node.service.fork(sandbox.id)
    assert not isinstance(child, BaseException)
    assert node.identities[-1].drives == {}  # it goes on where they are mounted
    spec = node.hypervisor.machines[child.sandbox.id].spec
    assert [layer.path.name for layer in spec.drives[0].layers][1:] == ["drive0"]
    checkpoint, _ = await node.service.checkpoint(sandbox.id)
    other = await created(node, wanted(checkpoint.id, drives=(DATA,)))
    assert {place: drive.id for place, drive in node.identities[-1].drives.items()} == {1: "data"}
    assert [drive.id for drive in other.drives] == ["work", "data"]
    with pytest.raises(InvalidRequest, match="two of this id"):
        await node.service.create(wanted(checkpoint.id, drives=(WORK,)))


async def test_what_is_written_counts_as_disk(node: MemoryNode) -> None:
    service = node.service
    before = service.admission.promised.disk_mib
    sandbox = await created(node, wanted(drives=(DATA, WORK)))
    assert service.admission.promised.disk_mib - before == 2048 + 4096
    await service.pause(sandbox.id)
    await quiet()
    assert service.admission.promised.disk_mib - before == 2048 + 4096
    service.admission.budget = Budget(replace(Need(), disk_mib=10_000, memory_mib=9000, vcpus=9, sandboxes=9))
    with pytest.raises(CapacityExceeded, match="disk"):
        await service.create(wanted(drives=(WORK,)))


async def test_drives_survive_the_node(node: MemoryNode) -> None:
    sandbox = await created(node, wanted(drives=(DATA, WORK)))
    await node.restart()
    assert node.service.get(sandbox.id).drives == sandbox.drives
    await node.service.pause(sandbox.id)
    await node.restart()
    await node.service.connect(sandbox.id, 300)
    assert [len(each.layers) for each in node.hypervisor.machines[sandbox.id].spec.drives] == [1, 2]


async def test_a_drive_too_small_for_its_image_is_refused(node: MemoryNode) -> None:
    small = new_drive("work", "debian:12", read_only=False, disk_mib=512)
    with pytest.raises(InvalidRequest, match=r"drive 'work'.*only grow"):
        await node.service.create(wanted(drives=(small,)))
    assert node.images.held == []


async def test_a_node_without_a_cache_says_so(node: MemoryNode) -> None:
    node.service._creating.sources._images = None
    with pytest.raises(NotImplementedYet):
        await node.service.create(wanted(drives=(DATA,)))
