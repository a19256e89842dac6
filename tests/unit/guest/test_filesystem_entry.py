"""What is told of a file."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from agentenv.guest.files_metadata import read_metadata, refusal, write_metadata
from agentenv.guest.filesystem_entry import entry, permissions, timestamp


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (stat.S_IFREG | 0o644, "-rw-r--r--"),
        (stat.S_IFDIR | 0o755, "drwxr-xr-x"),
        (stat.S_IFDIR | 0o1777, "dtrwxrwxrwx"),
        (stat.S_IFLNK | 0o777, "Lrwxrwxrwx"),
        (stat.S_IFREG | 0o4755, "urwxr-xr-x"),
        (stat.S_IFREG | 0o2711, "grwx--x--x"),
        (stat.S_IFCHR | 0o620, "Dcrw--w----"),
        (stat.S_IFBLK | 0o660, "Drw-rw----"),
        (stat.S_IFIFO | 0o600, "prw-------"),
        (stat.S_IFSOCK | 0o000, "S---------"),
    ],
)
def test_permissions_as_go_writes_them(mode: int, text: str) -> None:
    assert permissions(mode) == text


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "1970-01-01T00:00:00.000000000Z"),
        (1, "1970-01-01T00:00:00.000000001Z"),
        (-1, "1969-12-31T23:59:59.999999999Z"),
        (10**21, "9999-12-31T23:59:59.999999999Z"),
        (-(10**21), "0001-01-01T00:00:00.000000000Z"),
    ],
)
def test_times(nanoseconds: int, text: str) -> None:
    assert timestamp(nanoseconds) == text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello")
    path.chmod(0o4640)
    os.chown(path, 4321, 0)
    path.chmod(0o4640)
    told = entry(str(path))
    assert told["name"] == "a.txt"
    assert told["path"] == str(path)
    assert told["type"] == "FILE_TYPE_FILE"
    assert told["size"] == "5"
    assert told["mode"] == 0o640
    assert told["permissions"] == "urw-r-----"
    assert (told["owner"], told["group"]) == ("4321", "root")
    assert "symlinkTarget" not in told
    assert "metadata" not in told


def test_a_link_is_told_by_its_target(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o750)
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("d")
    told = entry(str(tmp_path / "one"))
    assert told["type"] == "FILE_TYPE_DIRECTORY"
    assert told["symlinkTarget"] == str(tmp_path / "d")
    assert told["mode"] == 0o750
    assert str(told["permissions"]).startswith("L")


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to("nothing")
    (tmp_path / "self").symlink_to("self")
    for name in ("gone", "self"):
        told = entry(str(tmp_path / name))
        assert told["type"] == "FILE_TYPE_SYMLINK"
        assert told["symlinkTarget"] == str(tmp_path / name)


def test_other_kinds_have_no_type(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for name in ("pipe", "socket"):
        assert "type" not in entry(str(tmp_path / name))


def test_names_that_are_not_utf8_can_be_told(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff"
    os.close(os.open(path, os.O_CREAT))
    assert entry(os.fsdecode(path))["name"] == "�"


def test_metadata_replaces_all_and_only_its_own(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.touch()
    os.setxattr(path, "user.other", b"stays")
    os.setxattr(path, "user.e2b.broken", b"\xff")
    fd = os.open(path, os.O_WRONLY)
    try:
        write_metadata(fd, {"a": "1", "b": ""})
        assert read_metadata(fd) == {"a": "1", "b": ""}
        write_metadata(fd, {"b": "2"})
    finally:
        os.close(fd)
    assert read_metadata(str(path)) == entry(str(path))["metadata"] == {"b": "2"}
    assert os.getxattr(path, "user.other") == b"stays"


def test_broken_metadata_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.touch()
    os.setxattr(path, "user.e2b.broken", b"\xff")
    os.setxattr(path, "user.e2b.good", b"1")
    assert read_metadata(str(path)) == {"good": "1"}
    assert read_metadata("/proc/self/status") == {}
    assert read_metadata(str(tmp_path / "none")) == {}


@pytest.mark.parametrize(
    ("metadata", "part"),
    [
        ({"": "x"}, "must not be empty"),
        ({"k" * 247: "x"}, "exceeds 246 bytes"),
        ({"k\n": "x"}, "printable"),
        ({"k": "ö"}, "printable"),
        ({"k": "x" * 4096}, "exceeds 4096 bytes"),
    ],
)
def test_metadata_that_cannot_be_kept(metadata: dict[str, str], part: str) -> None:
    assert part in (refusal(metadata) or "")


def test_metadata_at_the_limits() -> None:
    assert refusal({"k" * 246: "x"}) is None
    assert refusal({"k": "x" * (4096 - len("user.e2b.k"))}) is None
    assert refusal({}) is None
