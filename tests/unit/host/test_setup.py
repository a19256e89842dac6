"""Directories, and what setup tells as it goes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from agentenv.config import Settings
from agentenv.errors import HostFault, InvalidRequest, StoreFull
from agentenv.guestimage.steps import Report, Step
from agentenv.host.setup import (
    describe,
    directories,
    filesystem_faults,
    make_authority,
    make_directories,
    setup,
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "deep/home")


def test_directories_are_made_with_their_modes_whatever_the_umask(settings: Settings) -> None:
    old = os.umask(0o077)
    try:
        made = make_directories(settings)
    finally:
        os.umask(old)
    assert made == [str(path) for path in directories(settings)]
    for path, mode in directories(settings).items():
        assert path.stat().st_mode & 0o7777 == mode


def test_a_second_time_nothing_changes(settings: Settings) -> None:
    make_directories(settings)
    assert make_directories(settings) == []


def test_a_wrong_mode_is_mended(settings: Settings) -> None:
    make_directories(settings)
    settings.images_dir.chmod(0o777)
    assert make_directories(settings) == [str(settings.images_dir)]


def test_an_authority_is_made_once_for_a_domain(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", domain="sandbox.test:8443")
    make_directories(settings)
    first, second = Step(), Step()
    assert make_authority(settings, first) == [str(settings.tls_dir)]
    assert make_authority(settings, second) == []
    assert (first.changed, second.changed) == (True, False)
    assert first.detail == f"for sandbox.test, in {settings.tls_dir}"


def test_no_authority_for_a_domain_without_a_dot(settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match="no wildcard certificate for localhost"):
        setup(settings, local_ca=True)
    assert not any(settings.guest_dir.iterdir())  # told before anything that takes long


def test_a_place_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostFault, match="cannot make"):
        make_directories(Settings(home=tmp_path / "file/home"))


def test_a_full_disk_is_called_one(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match="no space left") as caught, filesystem_faults(settings):
        Path("/dev/full").write_text("x")
    assert "AENV_HOME" in str(caught.value.remedy)

    def to_a_full_disk(source: str, target: str) -> None:
        Path("/dev/full").write_bytes(Path(source).read_bytes())

    (tmp_path / "from").mkdir()
    (tmp_path / "from/file").write_text("x")
    with pytest.raises(StoreFull), filesystem_faults(settings):
        shutil.copytree(tmp_path / "from", tmp_path / "to", copy_function=to_a_full_disk)


def test_other_refusals_name_the_place_and_the_cause(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(HostFault, match="No such file"), filesystem_faults(settings):
        (tmp_path / "absent").read_text()


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (Report("kernel", "begun"), "looking for the guest kernel"),
        (Report("tools", "begun"), ""),
        (Report("tools", "done", 3.25, "47 MB"), "tools: 47 MB (3.2 s)"),
        (Report("tools", "unchanged", 0.0, "47 MB"), "tools: unchanged (47 MB)"),
        (Report("tools", "failed", 1.0, "no space"), "tools: failed"),
    ],
)
def test_reports_are_told_in_words(report: Report, line: str) -> None:
    assert describe(report) == line
