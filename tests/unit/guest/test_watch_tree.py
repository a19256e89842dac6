"""Watching real directories."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.guest import watch_inotify
from agentenv.guest.watch_inotify import Event, decode, on_network_filesystem
from agentenv.guest.watch_tree import TreeWatch, WatchLost

CREATE, WRITE, REMOVE, RENAME, CHMOD = (
    f"EVENT_TYPE_{name}" for name in ("CREATE", "WRITE", "REMOVE", "RENAME", "CHMOD")
)


def _open(root: Path) -> TreeWatch:
    tree = TreeWatch(str(root), recursive=True)
    list(tree.adopt(""))
    return tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def flat(root: Path) -> Iterator[TreeWatch]:
    tree = TreeWatch(str(root), recursive=False)
    yield tree
    tree.close()


@pytest.fixture
def deep(root: Path) -> Iterator[TreeWatch]:
    (root / "old/inner").mkdir(parents=True)
    tree = _open(root)
    yield tree
    tree.close()


def _write(path: Path) -> None:
    """As the agent stores a small file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.fchown(fd, os.getuid(), os.getgid())
    os.write(fd, b"content")
    os.close(fd)


def test_events_of_one_read() -> None:
    head = struct.Struct("iIII")
    data = head.pack(1, 0x100, 0, 16) + b"name".ljust(16, b"\0") + head.pack(-1, 0x4000, 7, 0)
    found = decode(data)
    assert [(event.watch, event.mask, event.cookie, event.name) for event in found] == [
        (1, 0x100, 0, "name"),
        (-1, 0x4000, 7, ""),
    ]
    assert decode(b"") == []


def test_each_kind(flat: TreeWatch, root: Path) -> None:
    _write(root / "f")
    assert flat.read() == [("f", CREATE), ("f", CHMOD), ("f", WRITE)]
    (root / "f").rename(root / "g")
    assert flat.read() == [("f", RENAME), ("g", CREATE)]
    (root / "g").unlink()
    assert flat.read() == [("g", REMOVE)]
    (root / "d").mkdir()
    (root / "d").chmod(0o700)
    (root / "d").rmdir()
    assert flat.read() == [("d", CREATE), ("d", CHMOD), ("d", REMOVE)]
    assert flat.read() == []


def test_reading_alone_is_no_event(flat: TreeWatch, root: Path) -> None:
    _write(root / "f")
    flat.read()
    (root / "f").read_bytes()
    os.listdir(root)
    assert flat.read() == []


def test_the_directory_itself(flat: TreeWatch, root: Path) -> None:
    root.chmod(0o700)
    assert flat.read() == [(".", CHMOD)]
    root.rename(root.with_name("moved"))
    assert flat.read() == [(".", RENAME)]
    root.with_name("moved").rmdir()
    assert flat.read() == [(".", REMOVE)]


def test_what_is_below_is_not_of_a_flat_watch(root: Path) -> None:
    (root / "d").mkdir()
    tree = TreeWatch(str(root), recursive=False)
    _write(root / "d/f")
    assert tree.read() == []
    tree.close()


def test_a_link_to_a_directory_is_followed_as_root_only(tmp_path: Path, root: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / "out").symlink_to("../elsewhere")
    (tmp_path / "link").symlink_to("root")
    tree = _open(tmp_path / "link")
    _write(root / "f")
    _write(tmp_path / "elsewhere/f")
    assert tree.read() == [("f", CREATE), ("f", CHMOD), ("f", WRITE)]
    tree.close()


def test_the_whole_tree(deep: TreeWatch, root: Path) -> None:
    _write(root / "old/inner/f")
    assert deep.read() == [("old/inner/f", kind) for kind in (CREATE, CHMOD, WRITE)]


def test_a_directorys_events_come_once(deep: TreeWatch, root: Path) -> None:
    (root / "old/inner").chmod(0o700)
    (root / "old/inner").rmdir()
    assert deep.read() == [("old/inner", CHMOD), ("old/inner", REMOVE)]


def test_new_directories_are_followed(deep: TreeWatch, root: Path) -> None:
    (root / "new").mkdir()
    assert deep.read() == [("new", CREATE)]
    _write(root / "new/f")
    assert deep.read() == [("new/f", kind) for kind in (CREATE, CHMOD, WRITE)]


def test_what_came_before_the_watch_is_told_once(deep: TreeWatch, root: Path) -> None:
    (root / "a/b/c").mkdir(parents=True)
    (root / "a/b/f").touch()
    assert deep.read() == [("a", CREATE), ("a/b", CREATE), ("a/b/c", CREATE), ("a/b/f", CREATE)]
    (root / "a/b/c/g").touch()
    assert [change for change in deep.read() if change[1] == CREATE] == [("a/b/c/g", CREATE)]


def test_a_file_with_content_that_came_before_the_watch_is_told_as_written(
    deep: TreeWatch, root: Path, tmp_path: Path
) -> None:
    (root / "a/b").mkdir(parents=True)
    _write(root / "a/b/f")
    (root / "a/b/g").symlink_to("f")
    assert deep.read() == [
        ("a", CREATE),
        ("a/b", CREATE),
        ("a/b/f", CREATE),
        ("a/b/f", WRITE),
        ("a/b/g", CREATE),
    ]
    (tmp_path / "full").mkdir()
    _write(tmp_path / "full/f")
    (tmp_path / "full").rename(root / "full")  # nothing is written by that
    assert deep.read() == [("full", CREATE), ("full/f", CREATE)]


def test_an_event_of_what_was_told_already_is_dropped_but_not_its_return(
    deep: TreeWatch, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The window between the watch on a new directory and the look into it, made wide.
    scan = os.scandir

    def slow_scan(path: str) -> object:
        if path.endswith("/new"):
            (root / "new/early").mkdir()
            (root / "new/gone").touch()
        return scan(path)

    monkeypatch.setattr(os, "scandir", slow_scan)
    (root / "new").mkdir()
    creations = [path for path, kind in deep.read() if kind == CREATE]
    assert sorted(creations) == ["new", "new/early", "new/gone"]
    monkeypatch.setattr(os, "scandir", scan)
    (root / "new/gone").unlink()
    (root / "new/gone").touch()
    assert [kind for path, kind in deep.read()][:2] == [REMOVE, CREATE]
    (root / "new/early/f").touch()
    assert deep.read()[0] == ("new/early/f", CREATE)


def test_a_rename_within_the_tree_keeps_the_watches(deep: TreeWatch, root: Path) -> None:
    (root / "old").rename(root / "renamed")
    assert deep.read() == [("old", RENAME), ("renamed", CREATE)]
    (root / "renamed/inner/f").touch()
    assert [change for change in deep.read() if change[1] == CREATE] == [("renamed/inner/f", CREATE)]


def test_a_directory_moved_out_is_nobodys(deep: TreeWatch, root: Path, tmp_path: Path) -> None:
    (root / "old").rename(tmp_path / "outside")
    (tmp_path / "outside/inner/f").touch()
    assert deep.read() == [("old", RENAME)]
    (tmp_path / "outside/inner/g").touch()
    assert deep.read() == []
    (tmp_path / "outside").rename(root / "back")
    assert deep.read() == [
        ("back", CREATE),
        ("back/inner", CREATE),
        ("back/inner/f", CREATE),
        ("back/inner/g", CREATE),
    ]
    (root / "back/inner/h").touch()
    assert deep.read()[0] == ("back/inner/h", CREATE)


def test_a_move_seen_in_two_reads(deep: TreeWatch, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "old").rename(root / "renamed")
    first, *rest = deep._inotify.read()
    batches = [[first], [], rest, []]
    with monkeypatch.context() as patch:
        patch.setattr(deep._inotify, "read", lambda: batches.pop(0))
        assert (deep.read(), deep.read()) == ([("old", RENAME)], [("renamed", CREATE)])
    (root / "renamed/inner/f").touch()
    assert deep.read()[0] == ("renamed/inner/f", CREATE)


def test_lost_events_are_an_error(flat: TreeWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat._inotify, "read", lambda: [Event(-1, watch_inotify.OVERFLOW, 0, "")])
    with pytest.raises(WatchLost):
        flat.read()


def test_names_that_are_not_utf8(flat: TreeWatch, root: Path) -> None:
    os.close(os.open(os.fsencode(root) + b"/\xff", os.O_CREAT))
    assert flat.read() == [("\udcff", CREATE)]


def test_what_cannot_be_watched(root: Path) -> None:
    (root / "f").touch()
    before = sorted(os.listdir("/proc/self/fd"))
    for name in ("f", "none"):
        with pytest.raises(OSError, match=name):
            TreeWatch(str(root / name), recursive=False)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_local_filesystems_are_no_network(root: Path) -> None:
    assert on_network_filesystem(str(root)) is False
    with pytest.raises(FileNotFoundError):
        on_network_filesystem(str(root / "none"))
