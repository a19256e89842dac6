"""Packages as apt tells of them, and unpacking one that was made here."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest

from agentenv.errors import HostFault, HostIncapable
from agentenv.guestimage import apt, kernel
from agentenv.guestimage.apt import Package

SHOWN = """\
Package: linux-image-cloud-amd64
Version: 6.12.95-1~bpo12+1
Depends: linux-image-6.12.95+deb12-cloud-amd64 (= 6.12.95-1~bpo12+1)
Description: Linux for x86-64 cloud (meta-package)
 Not a field: of this
Homepage: https://www.kernel.org/

Package: linux-image-cloud-amd64
Version: 6.1.192-3
Depends: linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3), other, third (>= 2) | fourth
"""

needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")


def test_every_version_is_found() -> None:
    first, second = apt.parse_show(SHOWN)
    assert first == Package(
        "linux-image-cloud-amd64", "6.12.95-1~bpo12+1", ("linux-image-6.12.95+deb12-cloud-amd64",)
    )
    assert second.depends == ("linux-image-6.1.0-57-cloud-amd64", "other", "third")


def test_nothing_shown_is_nothing_available() -> None:
    assert apt.parse_show("") == []


@needs_apt
def test_an_unknown_package_is_an_error_with_a_remedy() -> None:
    with pytest.raises(HostIncapable, match="no package no-such-package-at-all") as caught:
        apt.newest("no-such-package-at-all")
    assert "apt-get update" in str(caught.value)


@needs_apt
def test_what_cannot_be_fetched_says_so_and_leaves_nothing() -> None:
    missing = Package("no-such-package-at-all", "1.0", ())
    with (
        pytest.raises(HostFault, match=r"cannot fetch no-such-package-at-all=1\.0") as caught,
        apt.unpacked([missing]),
    ):
        pass
    assert "mirror" in str(caught.value)


@needs_apt
def test_versions_are_compared_as_the_distribution_does(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = ["6.1.192-3", "6.12.95-1", "6.12.95-1~bpo12+1", "6.12.95-1~bpo12+1"]
    found = [Package("linux", version, ()) for version in versions]
    monkeypatch.setattr(apt, "available", lambda name: found)
    assert apt.newest("linux").version == "6.12.95-1"


@needs_apt
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_apt_may_write_where_it_fetches_to() -> None:
    try:
        user = pwd.getpwnam("_apt")
    except KeyError:
        pytest.skip("apt has no user of its own here")
    with apt._download_directory() as directory:
        assert directory.stat().st_uid == user.pw_uid
    assert not directory.exists()


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Package]]:
    """Packages that apt is made to know."""
    known: dict[str, list[Package]] = {}
    monkeypatch.setattr(apt, "available", lambda name: known.get(name, []))
    return known


def test_debians_cloud_kernel(repository: dict[str, list[Package]]) -> None:
    repository["linux-image-cloud-amd64"] = apt.parse_show(SHOWN)
    release = "linux-image-6.12.95+deb12-cloud-amd64"
    repository[release] = [Package(release, "6.12.95-1~bpo12+1", ("kmod", "linux-base"))]
    assert [package.name for package in kernel.resolve()] == [release]


def test_ubuntus_virtual_kernel_with_its_modules(repository: dict[str, list[Package]]) -> None:
    image, modules = "linux-image-6.8.0-71-generic", "linux-modules-6.8.0-71-generic"
    repository["linux-image-virtual"] = [Package("linux-image-virtual", "6.8.0.71.73", (image,))]
    repository[image] = [Package(image, "6.8.0-71.71", ("kmod", modules))]
    repository[modules] = [Package(modules, "6.8.0-71.71", ())]
    assert [package.name for package in kernel.resolve()] == [image, modules]


def test_debians_kernel_in_three_packages(repository: dict[str, list[Package]]) -> None:
    release = "7.3.4+deb13-cloud-amd64"
    image, binary, modules, base = (
        f"linux-{part}-{release}" for part in ("image", "binary", "modules", "base")
    )
    metas = ("linux-base-cloud-amd64", "linux-modules-cloud-amd64")
    repository["linux-image-cloud-amd64"] = [Package("linux-image-cloud-amd64", "7.3.4-1", (image, *metas))]
    repository[image] = [Package(image, "7.3.4-1", ("dracut", base, binary, modules))]
    for name in (binary, modules, base):
        repository[name] = [Package(name, "7.3.4-1", ("kmod", base))]
    assert {package.name for package in kernel.resolve()} == {image, binary, modules, base}


def test_no_kernel_package_at_all(repository: dict[str, list[Package]]) -> None:
    with pytest.raises(HostIncapable, match="linux-image-cloud-amd64"):
        kernel.resolve()


def test_a_meta_package_of_nothing(repository: dict[str, list[Package]]) -> None:
    repository["linux-image-cloud-amd64"] = [Package("linux-image-cloud-amd64", "1", ("something",))]
    with pytest.raises(HostFault, match="depends on no kernel image"):
        kernel.resolve()


@needs_apt
def test_a_package_is_unpacked_and_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN/control").write_text(
        "Package: made-here\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: x\n"
    )
    (root / "DEBIAN/postinst").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (root / "DEBIAN/postinst").chmod(0o755)
    (root / "boot").mkdir()
    (root / "boot/vmlinuz-1").write_text("kernel")
    deb = tmp_path / "made-here_1_all.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", root, deb], check=True, capture_output=True)
    monkeypatch.setattr(apt, "_download", lambda names, directory: shutil.copy(deb, directory))
    with apt.unpacked([Package("made-here", "1", ())]) as tree:
        assert (tree / "boot/vmlinuz-1").read_text() == "kernel"
    assert not (tmp_path / "ran").exists()
    assert not tree.exists()
