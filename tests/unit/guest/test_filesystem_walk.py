"""Listing and removing trees."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agentenv.guest.filesystem_walk import remove_tree, walk


def _remove(path: Path) -> int:
    return len(list(remove_tree(str(path))))


def test_directories_come_before_what_is_in_them_and_names_in_byte_order(tmp_path: Path) -> None:
    for name in ("b", "a", "a-c", "a/x", "a/x/y", "Z"):
        (tmp_path / name).mkdir()
    assert list(walk(str(tmp_path), 1)) == ["Z", "a", "a-c", "b"]
    assert list(walk(str(tmp_path), 2)) == ["Z", "a", "a/x", "a-c", "b"]
    assert list(walk(str(tmp_path), 9)) == ["Z", "a", "a/x", "a/x/y", "a-c", "b"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/up").symlink_to("..")
    assert list(walk(str(tmp_path), 9)) == ["d", "d/up"]


def test_a_directory_that_vanishes_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    found = walk(str(tmp_path), 9)
    assert next(found) == "a"
    (tmp_path / "a/b").rmdir()
    (tmp_path / "a").rmdir()
    assert list(found) == ["c"]


def test_what_is_not_there_is_removed_already(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    _remove(tmp_path / "none")
    _remove(tmp_path / "none/deeper")
    _remove(tmp_path / "f/below")
    assert (tmp_path / "f").exists()


def test_remove_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep/file").touch()
    (tmp_path / "d").mkdir()
    (tmp_path / "d/out").symlink_to("../keep")
    (tmp_path / "link").symlink_to("keep")
    assert _remove(tmp_path / "d") == 2
    assert _remove(tmp_path / "link") == 1
    assert sorted(os.listdir(tmp_path)) == ["keep"]
    assert (tmp_path / "keep/file").exists()


def test_a_link_put_in_a_directorys_place_meanwhile_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep/file").touch()
    (tmp_path / "d/sub").mkdir(parents=True)
    (tmp_path / "d/sub/one").touch()
    (tmp_path / "d/sub/two").touch()
    removal = remove_tree(str(tmp_path / "d"))
    next(removal)  # inside sub
    (tmp_path / "d/sub").rename(tmp_path / "moved")
    (tmp_path / "d/sub").symlink_to("../keep")
    with pytest.raises(OSError, match="moved while it was being removed"):
        list(removal)
    assert (tmp_path / "keep/file").exists()


def test_trees_deeper_than_recursion_and_descriptors_allow(tmp_path: Path) -> None:
    top = os.open(tmp_path, os.O_RDONLY)
    fd = os.dup(top)
    for _ in range(1500):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    os.close(top)
    assert _remove(tmp_path / "d") == 1500
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_cannot_be_removed_is_said(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path / "d")], check=True)
    try:
        with pytest.raises(OSError, match="busy"):
            _remove(tmp_path / "d")
    finally:
        subprocess.run(["umount", str(tmp_path / "d")], check=True)
