"""What a host must have to start machines, done as for one, and what is said where it has not."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from agentenv.host import starting
from agentenv.host.capability import Capability

ROOT = Path(__file__).parents[3]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@needs_root
def test_this_host_can_start_machines() -> None:
    assert [each for each in starting.checks("qemu-system-x86_64") if each.status == "missing"] == []


@pytest.mark.parametrize(
    ("release", "status"),
    [
        ("5.12.0", "ok"),
        ("6.18.44-fc-v782", "ok"),
        ("10.0-rc1", "ok"),
        ("5.11.22-generic", "missing"),
        ("4.19.0-27-amd64", "missing"),
        ("what", "missing"),
    ],
)
def test_a_kernel_is_new_enough_for_views(release: str, status: str) -> None:
    found = starting.kernel(release)
    assert (found.status, found.required) == (status, True)
    assert ("5.12" in found.remedy) == (status == "missing")


def test_a_python_is_as_new_as_the_distribution_says() -> None:
    needs = re.search(r'requires-python = ">=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert needs is not None
    assert (int(needs[1]), int(needs[2])) == starting.OLDEST_PYTHON
    assert starting.python().status == "ok"
    assert starting.python((3, 10, 12)).status == "missing"


def test_capabilities_that_a_container_lacks_are_named() -> None:
    everything = starting.effective("Name:\taenv\nCapEff:\t000001ffffffffff\nCapBnd:\t0\n")
    assert starting.capabilities(everything).status == "ok"
    docker = starting.capabilities(starting.effective("CapEff:\t00000000a80425fb\n"))
    assert docker.status == "missing"
    assert docker.detail == "without CAP_NET_ADMIN, CAP_SYS_PTRACE, CAP_SYS_ADMIN"
    assert starting.effective("") == 0


def test_the_unit_leaves_the_node_what_it_is_asked_for() -> None:
    unit = (ROOT / "packaging/agentenv.service").read_text()
    left = {name for line in re.findall(r"^CapabilityBoundingSet=(.*)", unit, re.M) for name in line.split()}
    assert set(starting.CAPABILITIES.values()) <= left


def test_few_open_files_are_a_matter_of_scale() -> None:
    assert starting.descriptors(1024).status == "degraded"
    assert not starting.descriptors(1024).required
    assert starting.descriptors(1 << 20).status == "ok"


def test_a_script_in_place_of_qemu_is_told(tmp_path: Path) -> None:
    script = tmp_path / "qemu"
    script.write_text('#!/bin/sh\nexec qemu-system-x86_64 "$@"\n')
    script.chmod(0o755)
    found = starting.isolation(str(script))
    assert (found.status, found.required) == ("missing", True)
    assert "script" in found.detail
    assert "AENV_QEMU" in found.remedy


@pytest.mark.parametrize("check", [starting.isolation, lambda _: starting.confinement()])
def test_what_is_not_there_is_named(check: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("prlimit") is None
    assert callable(check)
    found = check("qemu-system-x86_64")
    assert isinstance(found, Capability)
    assert found.status == "missing"
    assert "install" in found.remedy
