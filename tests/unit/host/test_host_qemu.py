"""Which QEMU will do."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.host import qemu
from agentenv.host.capability import Status
from agentenv.vmm.qemu.version import Version


@pytest.mark.parametrize(
    ("found", "kvm", "status"),
    [
        ((10, 0, 2), False, "ok"),
        ((8, 2, 0), False, "ok"),
        ((8, 1, 5), False, "missing"),
        ((7, 2, 17), False, "missing"),
        ((7, 2, 17), True, "missing"),
        (None, True, "missing"),
        (None, False, "missing"),
    ],
)
def test_old_ones_are_refused(found: Version | None, kvm: bool, status: Status) -> None:
    judged = qemu.judge("qemu-system-x86_64", found, kvm=kvm)
    assert judged.status == status
    assert judged.required
    assert bool(judged.remedy) is (status != "ok")


def test_the_reason_and_the_way_to_a_newer_one_are_told() -> None:
    judged = qemu.judge("qemu", (7, 2, 0), kvm=False, distribution="bookworm")
    assert "cmpxchg16b" in judged.detail
    assert "-t bookworm-backports" in judged.remedy


def test_no_program_has_no_version(tmp_path: Path) -> None:
    assert qemu.version(str(tmp_path / "nothing")) is None
    assert qemu.version("/bin/true") is None
