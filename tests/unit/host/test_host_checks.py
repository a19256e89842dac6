"""Each check on this host, and what it says where something is amiss."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentenv.config import Settings
from agentenv.host import checks, doctor, kvm
from agentenv.vmm.cgroup import Cgroups, Parent

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


@needs_root
@pytest.mark.parametrize(
    "check",
    [checks.root, checks.tun, checks.namespaces, checks.veth, checks.nftables],
    ids=lambda c: c.__name__,
)
def test_this_host_can_run_machines(check: checks.Check) -> None:
    found = check()
    assert found.status == "ok", found
    assert found.required


def links() -> set[str]:
    """Those that the checks make; others' come and go meanwhile."""
    return {"aenv0", "aenv1"} & set(os.listdir("/sys/class/net"))


@needs_root
def test_checks_leave_nothing_behind(settings: Settings) -> None:
    before = links()
    checks.veth()
    checks.nftables()
    checks.reflink(settings)
    checks.xattrs(settings)
    assert links() == before
    assert not settings.home.exists()
    assert list(settings.home.parent.iterdir()) == []


def test_programs_are_looked_for_and_named_with_their_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "SYSTEM_PATH", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nft").write_text("#!/bin/sh\n")
    (tmp_path / "nft").chmod(0o755)
    found = {one.name: one for one in checks.programs()}
    assert found["nft"].status == "ok"
    assert found["mke2fs"].status == "missing"
    assert found["mke2fs"].remedy == "apt install e2fsprogs"
    assert found["mke2fs"].required
    assert not found["mmdebstrap"].required


def test_a_data_directory_that_is_not_there_yet(settings: Settings) -> None:
    found = checks.home(settings)
    assert found.status == "ok"
    assert "aenv setup makes it" in found.detail


def test_a_data_directory_that_cannot_be(tmp_path: Path) -> None:
    found = checks.home(Settings(home=Path("/proc/aenv")))
    assert found.status == "missing"
    assert "AENV_HOME" in found.remedy


@pytest.mark.parametrize(
    ("available_kib", "status"), [(100 * 1024, "missing"), (1024 * 1024, "degraded"), (8 * 1024 * 1024, "ok")]
)
def test_memory_is_measured_by_a_machine(settings: Settings, available_kib: int, status: str) -> None:
    text = f"MemTotal:       99999999 kB\nMemAvailable:   {available_kib} kB\n"
    assert checks.memory(settings, text).status == status


def test_disk_space_of_a_directory_to_come(settings: Settings) -> None:
    found = checks.disk(settings)
    assert "GiB free" in found.detail


def test_control_groups() -> None:
    everything = Cgroups([Parent(Path("/sys/fs/cgroup/a"), 2, ("cpu", "io", "memory", "pids"))])
    assert checks.cgroups(everything).status == "ok"
    nothing = checks.cgroups(Cgroups([], "no cgroup hierarchy is mounted"))
    assert nothing.status == "degraded"
    assert "no cgroup hierarchy" in nothing.detail
    assert not nothing.required


def test_a_program_that_fails_is_quoted() -> None:
    assert checks.complaint(["sh", "-c", "echo one >&2; echo two >&2; exit 3"]) == "two"
    assert checks.complaint(["sh", "-c", "exit 3"]) == "sh failed with status 3"
    assert checks.complaint(["no-such-program-at-all"]) == "no program no-such-program-at-all"
    assert checks.complaint(["cat"], "text") is None


def test_doctor_before_setup(settings: Settings) -> None:
    found = {one.name: one for one in doctor.run(settings)}
    assert found["guest files"].status == "missing"
    assert found["guest files"].remedy == "aenv setup"
    assert not doctor.able(list(found.values()))
    assert len(found) == len(doctor.run(settings))  # no two of the same name


def test_kvm_that_does_not_work_is_a_matter_of_speed(settings: Settings) -> None:
    found = doctor.accelerated(settings, kvm.Verdict(False, "it does not boot"))
    assert (found.status, found.required) == ("degraded", False)
    assert "it does not boot" in found.detail


def test_kvm_that_is_asked_for_must_work(tmp_path: Path) -> None:
    asked = Settings(home=tmp_path, accelerator="kvm")
    found = doctor.accelerated(asked, kvm.Verdict(False, "it does not boot"))
    assert (found.status, found.required) == ("missing", True)


def test_kvm_that_works_but_is_not_wanted(tmp_path: Path) -> None:
    asked = Settings(home=tmp_path, accelerator="tcg")
    assert "not used" in doctor.accelerated(asked, kvm.Verdict(True, "it boots")).detail
