"""The command line of a machine, decided from its specification."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.vmm.machine import DRIVES_MOST, Drive, GuestFiles, Layer, MachineSpec, Nic
from agentenv.vmm.qemu.command import (
    Accelerator,
    Descriptors,
    DriveFiles,
    Emulation,
    boot_command,
    devices,
    kernel_command_line,
    live_node,
    overlay_node,
    restore_command,
    state_of,
)

GUEST = GuestFiles(Path("/g/vmlinuz"), Path("/g/initramfs"), Path("/g/tools"))
LAYERS = (Layer(Path("/i/base.ext4"), "raw"), Layer(Path("/i/one.qcow2"), "qcow2"))
SPEC = MachineSpec("m1", 3, 700, 2048, GUEST, LAYERS, Nic(Path("/n/a"), "tap0", "02:fc:00:00:00:05"), 70001)
DESCRIPTORS = Descriptors(
    kernel=11, initramfs=12, memory=13, tools=14, layers=(15, 16), disk=(17, 18), tap=19, qmp=20, console=21
)
TCG = Emulation("tcg", 2_445_406, 48)


def command(
    spec: MachineSpec = SPEC, descriptors: Descriptors = DESCRIPTORS, emulation: Emulation = TCG
) -> list[str]:
    return boot_command("/usr/bin/qemu", spec, descriptors, emulation)


def values(argv: list[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(argv) if name == option]


def nodes(argv: list[str]) -> dict[str, dict[str, object]]:
    parsed = [json.loads(value) for value in values(argv, "-blockdev")]
    return {node["node-name"]: node for node in parsed}


def test_every_descriptor_is_used_once() -> None:
    argv = " ".join(command())
    for number in DESCRIPTORS.all():
        passed = argv.count(f"fd={number},")
        assert passed + argv.endswith(f"fd={number}") + argv.count(f"fd={number} ") == 1, number


def test_no_path_of_the_host_is_named() -> None:
    argv = " ".join(command())
    assert not any(path in argv for path in ("/g/", "/i/", "/n/"))


def test_the_machine_waits_and_is_confined() -> None:
    argv = command()
    assert argv[0] == "/usr/bin/qemu"
    assert {"-S", "-nodefaults", "-no-user-config", "-no-reboot"} <= set(argv)
    (sandbox,) = values(argv, "-sandbox")
    assert sandbox == "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
    assert values(argv, "-global") == ["migration.send-configuration=off", "migration.announce-rounds=0"]
    (machine,) = values(argv, "-machine")
    assert {"microvm", "acpi=on", "memory-backend=memory", "suppress-vmdesc=on"} <= set(machine.split(","))
    assert not any("balloon" in word for word in argv)


def test_vcpus_and_memory_are_as_asked() -> None:
    argv = command()
    assert values(argv, "-smp") == ["3"]
    assert values(argv, "-m") == ["700M"]
    assert values(argv, "-object") == [
        "memory-backend-file,id=memory,size=700M,share=on,mem-path=/machine/memory"
    ]


def test_disks_are_found_by_serial_and_in_a_fixed_order() -> None:
    devices = [value for value in values(command(), "-device") if value.startswith("virtio-blk-device")]
    serials = [dict(part.split("=") for part in value.split(",")[1:])["serial"] for value in devices]
    assert serials == ["root", "tools", *(f"spare{n}" for n in range(DRIVES_MOST))]
    assert all(len(serial) <= 20 for serial in serials)  # what virtio-blk carries


def test_layers_lie_upon_each_other_and_only_the_top_is_written() -> None:
    graph = nodes(command())
    assert graph["layer0"]["driver"] == "raw"
    assert "backing" not in graph["layer0"]
    assert graph["layer1"]["backing"] == "layer0"
    assert graph["layer2"]["backing"] == "layer1"
    assert [name for name, node in graph.items() if not node.get("read-only")] == [
        "layer2",
        *(f"spare{n}" for n in range(DRIVES_MOST)),
    ]
    assert graph["layer2"]["cache"] == {"no-flush": True}
    assert values(command(), "-add-fd")[2:4] == ["fd=17,set=17", "fd=18,set=17"]


def test_a_machine_without_layers_has_an_empty_disk() -> None:
    graph = nodes(command(replace(SPEC, layers=()), replace(DESCRIPTORS, layers=())))
    assert graph["layer0"]["driver"] == "qcow2"
    assert graph["layer0"]["backing"] is None


def test_a_layer_without_a_descriptor_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        command(descriptors=replace(DESCRIPTORS, layers=(15,)))


def test_emulation_knows_the_clock_and_bounds_its_buffer() -> None:
    argv = command()
    assert values(argv, "-accel") == ["tcg,tb-size=48"]
    assert values(argv, "-cpu") == ["max,erms=off,fsrm=off"]
    assert "tsc_early_khz=2445406 tsc=reliable" in values(argv, "-append")[0]


@pytest.mark.parametrize(
    ("emulation", "memory_mib", "buffer_mib"),
    [
        (Emulation("tcg", 1, 48), 2048, 48),
        (Emulation("tcg", 1), 2048, 256),
        (Emulation("tcg", 1), 128, 32),
        (Emulation("kvm", 1, 48), 2048, 0),
    ],
)
def test_the_buffer_goes_by_the_memory(emulation: Emulation, memory_mib: int, buffer_mib: int) -> None:
    assert emulation.buffer_of(memory_mib) == buffer_mib


def test_a_machine_may_tell_its_kernel_more() -> None:
    argv = command(replace(SPEC, words=("agentenv.init=systemd",)))
    assert argv[argv.index("-append") + 1] == f"{kernel_command_line(TCG)} agentenv.init=systemd"
    assert argv[: argv.index("-append")] == command()[: command().index("-append")]


def test_kvm_is_handed_over_open() -> None:
    argv = command(descriptors=replace(DESCRIPTORS, kvm=30), emulation=Emulation("kvm", 2_445_406, 48))
    assert values(argv, "-accel") == ["kvm,device=/dev/fdset/30"]
    assert values(argv, "-cpu") == ["host"]
    assert "tsc" not in values(argv, "-append")[0]
    assert 30 in replace(DESCRIPTORS, kvm=30).all()


@pytest.mark.parametrize("accelerator", ["kvm", "tcg"])
def test_the_kernel_is_quiet_and_ends_with_its_machine(accelerator: Accelerator) -> None:
    words = kernel_command_line(Emulation(accelerator, 1_000_000, 32)).split()
    assert {"quiet", "panic=-1", "reboot=t", "console=ttyS0"} <= set(words)


SAVED = replace(DESCRIPTORS, kernel=None, initramfs=None, state=22)


def restored(spec: MachineSpec = SPEC, emulation: Emulation = TCG) -> list[str]:
    return restore_command("/usr/bin/qemu", spec, SAVED, emulation)


def test_a_restored_machine_cannot_reach_the_memory_file() -> None:
    assert values(restored(), "-object") == [
        "memory-backend-file,id=memory,size=700M,share=off,readonly=on,rom=off,mem-path=/machine/memory"
    ]


def test_a_restored_machine_waits_for_its_state() -> None:
    argv = restored()
    assert values(argv, "-incoming") == ["defer"]
    assert "-S" in argv
    assert "fd=22,set=22" in values(argv, "-add-fd")
    assert state_of(SAVED) == "file:/dev/fdset/22"
    assert not {"-kernel", "-initrd", "-append"} & set(argv)
    assert set(SAVED.all()) == set(range(14, 23))
    assert SAVED.seen() == {"memory": 13}


def test_both_launches_have_the_same_devices_in_the_same_order() -> None:
    for option in ("-device", "-machine", "-cpu", "-smp", "-m", "-global"):
        assert values(restored(), option) == values(command(), option)
    assert nodes(restored()) == nodes(command())


def test_devices_are_told_without_what_differs_between_clones() -> None:
    other = replace(SPEC, id="m2", layers=(), nic=Nic(Path("/n/b"), "tap7", "02:fc:00:00:00:09"), uid=9)
    assert devices(other) == devices(SPEC)
    assert sum("virtio-blk" in words for words in devices(SPEC)) == 2 + DRIVES_MOST


def test_the_next_layer_is_like_the_first_but_upon_nothing_yet() -> None:
    first = nodes(command())[live_node(2)]
    assert overlay_node("layer2", 17) == {**first, "backing": None}


def test_drives_take_the_first_places_and_are_the_same_devices() -> None:
    image = Layer(Path("/i/data.ext4"), "raw")
    drives = (Drive((image,)), Drive((image, Layer(Path("/s/one/drive1"), "qcow2")), True, 2048))
    spec = replace(SPEC, drives=drives)
    files = (DriveFiles((31,)), DriveFiles((32, 33), (34, 35)))
    argv = command(spec, replace(DESCRIPTORS, drives=files))
    found = nodes(argv)
    assert found["drive0layer0"]["read-only"] is True
    own = found["drive1layer2"]
    assert own["backing"] == "drive1layer1" and "read-only" not in own
    assert found["drive1layer1"]["backing"] == "drive1layer0"
    given = [value for value in values(argv, "-device") if "spare" in value]
    assert [value.split(",")[1:3] for value in given] == [
        ["drive=drive0layer0", "serial=spare0"],
        ["drive=drive1layer2", "serial=spare1"],
        ["drive=spare2", "serial=spare2"],
        ["drive=spare3", "serial=spare3"],
    ]
    for number in (31, 32, 33, 34, 35):
        assert " ".join(argv).count(f"-add-fd fd={number},") == 1
    assert devices(spec) == devices(SPEC)
