"""What must be the same at a restore, and how a difference is told."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.errors import HostIncapable
from agentenv.vmm.machine import GuestFiles, Incompatible, Layer, MachineSpec, Nic
from agentenv.vmm.qemu.command import Emulation
from agentenv.vmm.qemu.fingerprint import cpu, fingerprint_of, require_same

TCG = Emulation("tcg", 2_445_406, 48)
CPUINFO = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Some Processor
stepping\t: 8
cpu MHz\t\t: 2445.406
flags\t\t: fpu vme de pse

processor\t: 1
vendor_id\t: GenuineIntel
flags\t\t: something else
"""


@pytest.fixture
def spec(tmp_path: Path) -> MachineSpec:
    guest = GuestFiles(tmp_path / "kernel", tmp_path / "initramfs", tmp_path / "tools")
    for path in (guest.kernel, guest.initramfs, guest.tools):
        path.write_text(path.name)
    nic = Nic(Path("/n/a"), "tap0", "02:fc:00:00:00:05")
    return MachineSpec("m1", 1, 128, 256, guest, (), nic, 70001)


def test_clones_have_the_same_fingerprint(spec: MachineSpec) -> None:
    layers = (Layer(Path("/i/one.qcow2"), "qcow2"),)
    clone = replace(spec, id="m2", disk_mib=512, layers=layers, uid=9)
    clone = replace(clone, nic=Nic(Path("/n/b"), "tap1", "02:fc:00:00:00:06"))
    here = fingerprint_of(spec, TCG, (10, 0, 2))
    assert fingerprint_of(clone, replace(TCG, buffer_mib=32), (10, 0, 2)) == here
    require_same(here, here)


def test_the_first_difference_is_told(spec: MachineSpec) -> None:
    here = fingerprint_of(spec, TCG, (10, 0, 2))
    there = fingerprint_of(replace(spec, vcpus=2), TCG, (9, 2, 0))
    with pytest.raises(Incompatible, match=r"another version: 9.2.0 there, 10.0.2 here"):
        require_same(there, here)


def test_what_only_one_side_knows_differs(spec: MachineSpec) -> None:
    here = fingerprint_of(spec, TCG, (10, 0, 2))
    with pytest.raises(Incompatible, match="another numa: 2 there, unknown here"):
        require_same({**here, "numa": "2"}, here)
    without = {key: value for key, value in here.items() if key != "kernel"}
    with pytest.raises(Incompatible, match="another kernel: unknown there"):
        require_same(without, here)


@pytest.mark.parametrize(
    ("khz", "same"), [(2_445_406, True), (2_445_800, True), (2_446_406, False), (2_000_000, False)]
)
def test_a_rate_measured_again_is_the_same(spec: MachineSpec, khz: int, same: bool) -> None:
    here = fingerprint_of(spec, TCG, (10, 0, 2))
    there = fingerprint_of(spec, replace(TCG, tsc_khz=khz), (10, 0, 2))
    if same:
        require_same(there, here)
    else:
        with pytest.raises(Incompatible, match=f"another tsc_khz: {khz} there"):
            require_same(there, here)


def test_a_replaced_file_is_another_one(spec: MachineSpec, tmp_path: Path) -> None:
    before = fingerprint_of(spec, TCG, (10, 0, 2))
    new = tmp_path / "new"
    new.write_text("other tools")
    os.replace(new, spec.guest.tools)
    after = fingerprint_of(spec, TCG, (10, 0, 2))
    assert {key for key in before if before[key] != after[key]} == {"tools"}
    spec.guest.tools.unlink()
    with pytest.raises(HostIncapable, match="aenv setup"):
        fingerprint_of(spec, TCG, (10, 0, 2))


def test_with_kvm_the_hosts_processor_counts() -> None:
    assert cpu("tcg", CPUINFO) == cpu("tcg", "")
    host = cpu("kvm", CPUINFO)
    assert host.startswith("host GenuineIntel/6/143/8 ")
    assert cpu("kvm", CPUINFO.replace("2445.406", "1999.999")) == host
    assert cpu("kvm", CPUINFO.replace("fpu vme de pse", "pse de vme fpu")) == host
    assert cpu("kvm", CPUINFO.replace("fpu vme", "fpu vme avx")) != host
    assert cpu("kvm", CPUINFO.replace("143", "85")) != host
