"""Paths as clients give them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.guest.paths import PathError, base_name, expand, make_directories, parent, printable


class Home:
    home = "/home/user"


@pytest.mark.parametrize(
    ("given_path", "expanded"),
    [
        ("", "/home/user"),
        ("~", "/home/user"),
        ("~/a", "/home/user/a"),
        ("a/b", "/home/user/a/b"),
        ("../b", "/home/b"),
        ("./a/", "/home/user/a"),
        ("/etc/passwd", "/etc/passwd"),
        ("a~b", "/home/user/a~b"),
        ("日本", "/home/user/日本"),
    ],
)
def test_expand(given_path: str, expanded: str) -> None:
    assert expand(given_path, Home()) == expanded


def test_the_default_directory_is_for_the_empty_path_only() -> None:
    assert expand("", Home(), "/work") == "/work"
    assert expand("a", Home(), "/work") == "/home/user/a"


@pytest.mark.parametrize("path", ["~root", "~root/x", "a\0b", "/\ud800", "/" + "a/" * 3000])
def test_what_cannot_be_a_path_is_refused(path: str) -> None:
    with pytest.raises(PathError):
        expand(path, Home())


@given(st.text())
def test_any_text_becomes_an_absolute_path_or_is_refused(text: str) -> None:
    try:
        path = expand(text, Home())
    except PathError:
        return
    assert path.startswith("/")
    assert b"\0" not in os.fsencode(path)
    printable(path).encode("utf-8")


def test_names_and_parents() -> None:
    assert (base_name("/a/b"), base_name("/a/b//"), base_name("/")) == ("b", "b", "/")
    assert (parent("/a/b"), parent("/a/b//"), parent("/a"), parent("/")) == ("/a", "/a", "/", "/")


def test_bytes_that_are_not_utf8_are_shown_as_replacements() -> None:
    assert printable(os.fsdecode(b"/a\xff")) == "/a�"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_new_directories_are_the_users_and_old_ones_stay(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    make_directories(str(tmp_path / "a/b"), 65534, 65534)
    for made in (tmp_path / "a", tmp_path / "a/b"):
        assert (made.stat().st_uid, made.stat().st_gid) == (65534, 65534)
        assert made.stat().st_mode & 0o777 == 0o755
    assert tmp_path.stat().st_uid == os.getuid()
    make_directories(str(tmp_path / "a/b"), 0, 0)
    assert (tmp_path / "a/b").stat().st_uid == 65534


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    for path in ("f", "f/g"):
        with pytest.raises(NotADirectoryError):
            make_directories(str(tmp_path / path), 0, 0)
