"""The record of what is in force, and the links beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.guestimage import manifest
from agentenv.guestimage.manifest import Manifest, Part


def part(name: str) -> Part:
    return Part(f"{name}-0123", f"digest of {name}", f"key of {name}", f"a {name}")


@pytest.fixture
def made() -> Manifest:
    return Manifest(part("busybox"), part("kernel"), part("initramfs"), part("tools"), "6.12", "modules")


def test_it_is_read_as_it_was_written(tmp_path: Path, made: Manifest) -> None:
    manifest.write(tmp_path, made)
    assert manifest.read(tmp_path) == made


def test_links_follow_it(tmp_path: Path, made: Manifest) -> None:
    manifest.write(tmp_path, made)
    manifest.write(tmp_path, replace(made, tools=replace(made.tools, file="tools-4567")))
    assert (tmp_path / "tools").readlink() == Path("tools-4567")
    assert (tmp_path / "kernel").readlink() == Path("kernel-0123")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["guest.json", "initramfs", "kernel", "tools"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 0}', '{"format": 1, "kernel": 3}'])
def test_another_format_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / manifest.NAME).write_text(text)
    assert manifest.read(tmp_path) is None


def test_a_format_to_come_is_none(tmp_path: Path, made: Manifest) -> None:
    manifest.write(tmp_path, made)
    content = json.loads((tmp_path / manifest.NAME).read_text())
    (tmp_path / manifest.NAME).write_text(json.dumps({**content, "format": manifest.FORMAT + 1}))
    assert manifest.read(tmp_path) is None


def test_digests_depend_on_names_and_contents(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a")
    two.write_text("b")
    before = manifest.digest_files([one, two], tmp_path)
    assert before == manifest.digest_files([two, one], tmp_path)
    one.write_text("b")
    two.write_text("a")
    assert manifest.digest_files([one, two], tmp_path) != before
    assert manifest.key_of("a", "bc") != manifest.key_of("ab", "c")
