"""The filesystem calls through E2B's own client, and by hand where it would not go."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import (
    AsyncSandbox,
    FileNotFoundException,
    FilesystemEvent,
    FilesystemEventType,
    FileType,
    InvalidArgumentException,
    Sandbox,
    SandboxException,
)

from support.guest_agent import file_agent

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the agent hands files to users: it is root")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with file_agent() as url:
        yield url


@pytest.fixture(scope="module")
def files(url: str) -> Any:
    return Sandbox.create(debug=True, sandbox_url=url).files


def _call(url: str, method: str, **message: object) -> tuple[int, Any]:
    content = json.dumps(message)
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{url}/filesystem.Filesystem/{method}", content=content, headers=headers)
    return answer.status_code, answer.json()


def test_a_file(files: Any, tmp_path: Path) -> None:
    path = f"{tmp_path}/dir/a.txt"
    info = files.write(path, "Hello", metadata={"Author": "me"})
    assert (info.path, info.name, info.type, info.metadata) == (
        path,
        "a.txt",
        FileType.FILE,
        {"author": "me"},
    )
    assert files.read(path) == "Hello"
    told = files.get_info(path)
    assert (told.size, told.mode, told.permissions) == (5, 0o644, "-rw-r--r--")
    assert (told.owner, told.group) == ("root", "root")
    assert told.modified_time.tzinfo is not None
    assert told.symlink_target is None
    assert told.metadata == {"author": "me"}


def test_users(files: Any, tmp_path: Path) -> None:
    files.write(f"{tmp_path}/f", "x", user="nobody")
    files.make_dir(f"{tmp_path}/d", user="nobody")
    assert files.get_info(f"{tmp_path}/f").owner == "nobody"
    assert files.get_info(f"{tmp_path}/d").owner == "nobody"
    with pytest.raises(Exception, match="invalid username: 'nosuch'"):
        files.list("/", user="nosuch")


def test_directories(files: Any, tmp_path: Path) -> None:
    assert files.make_dir(f"{tmp_path}/a/b") is True
    assert files.make_dir(f"{tmp_path}/a/b") is False
    files.write(f"{tmp_path}/a/f", "x")
    assert [entry.path for entry in files.list(str(tmp_path))] == [f"{tmp_path}/a"]
    deeper = files.list(f"{tmp_path}/a/..", depth=2)
    assert [entry.name for entry in deeper] == ["a", "b", "f"]
    assert [entry.type for entry in deeper] == [FileType.DIR, FileType.DIR, FileType.FILE]
    with pytest.raises(InvalidArgumentException):
        files.make_dir(f"{tmp_path}/a/f")
    with pytest.raises(InvalidArgumentException):
        files.make_dir(f"{tmp_path}/a/f/g")
    with pytest.raises(InvalidArgumentException):
        files.list(f"{tmp_path}/a/f")
    with pytest.raises(FileNotFoundException):
        files.list(f"{tmp_path}/none")


def test_links(files: Any, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").touch()
    (tmp_path / "link").symlink_to("d")
    (tmp_path / "loop").symlink_to("loop")
    link = files.get_info(f"{tmp_path}/link")
    assert (link.type, link.symlink_target) == (FileType.DIR, f"{tmp_path}/d")
    assert [entry.path for entry in files.list(f"{tmp_path}/link")] == [f"{tmp_path}/link/f"]
    assert {entry.name: entry.type for entry in files.list(str(tmp_path))}["loop"] == FileType.SYMLINK
    with pytest.raises(SandboxException, match="cyclic"):
        files.list(f"{tmp_path}/loop")


def test_move(files: Any, url: str, tmp_path: Path) -> None:
    files.write(f"{tmp_path}/f", "x", metadata={"k": "v"})
    moved = files.rename(f"{tmp_path}/f", f"{tmp_path}/new/g")
    assert (moved.name, moved.path, moved.metadata) == ("g", f"{tmp_path}/new/g", {"k": "v"})
    assert not files.exists(f"{tmp_path}/f")
    with pytest.raises(FileNotFoundException):
        files.rename(f"{tmp_path}/none", f"{tmp_path}/made/g")
    assert not files.exists(f"{tmp_path}/made")
    (tmp_path / "full/x").mkdir(parents=True)
    status, error = _call(url, "Move", source=f"{tmp_path}/new", destination=f"{tmp_path}/full")
    assert (status, error["code"]) == (400, "failed_precondition")


def test_remove(files: Any, tmp_path: Path) -> None:
    files.write(f"{tmp_path}/d/e/f", "x")
    files.remove(f"{tmp_path}/d")
    files.remove(f"{tmp_path}/d")
    assert os.listdir(tmp_path) == []
    with pytest.raises(InvalidArgumentException, match="root directory"):
        files.remove("/")


@pytest.mark.parametrize(
    "path", ["a\0b", "~other/x", "/" + "n/" * 3000, "/" + "n" * 300, "/etc/passwd/x", "\ud800"]
)
@pytest.mark.parametrize("method", ["Stat", "MakeDir", "ListDir", "Remove", "CreateWatcher", "Move"])
def test_odd_paths_are_answered(url: str, method: str, path: str) -> None:
    message = {"source": "/etc/hostname", "destination": path} if method == "Move" else {"path": path}
    status, body = _call(url, method, **message)
    if method == "Remove" and path == "/etc/passwd/x":
        assert (status, body) == (200, {})
    else:
        assert (status, body["code"]) in ((400, "invalid_argument"), (404, "not_found"))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Stat", {"path": 3}),
        ("ListDir", {"path": "/", "depth": "x"}),
        ("ListDir", {"path": "/", "depth": -1}),
        ("CreateWatcher", {"path": "/", "recursive": "yes"}),
        ("GetWatcherEvents", {"watcherId": []}),
    ],
)
def test_wrong_types_are_answered(url: str, method: str, message: dict[str, object]) -> None:
    status, body = _call(url, method, **message)
    assert (status, body["code"]) == (400, "invalid_argument")


def _kinds(events: list[FilesystemEvent]) -> list[tuple[str, FilesystemEventType]]:
    return [(event.name, event.type) for event in events]


def test_a_fetched_watch(files: Any, tmp_path: Path) -> None:
    handle = files.watch_dir(str(tmp_path), include_entry=True)
    files.write(f"{tmp_path}/f", "content")
    events = handle.get_new_events()
    kinds = FilesystemEventType
    assert _kinds(events) == [("f", kinds.CREATE), ("f", kinds.CHMOD), ("f", kinds.WRITE)]
    assert events[2].entry.path == f"{tmp_path}/f"
    files.write(f"{tmp_path}/f", "x" * 100_000)
    assert _kinds(handle.get_new_events()) == [("f", kinds.CHMOD), ("f", kinds.WRITE)]
    files.rename(f"{tmp_path}/f", f"{tmp_path}/g")
    files.remove(f"{tmp_path}/g")
    events = handle.get_new_events()
    assert _kinds(events) == [("f", kinds.RENAME), ("g", kinds.CREATE), ("g", kinds.REMOVE)]
    assert (events[0].entry, events[2].entry) == (None, None)
    assert handle.get_new_events() == []
    handle.stop()


def test_a_fetched_watch_of_a_tree(files: Any, tmp_path: Path) -> None:
    handle = files.watch_dir(str(tmp_path), recursive=True)
    files.write(f"{tmp_path}/new/f", "content")
    kinds = FilesystemEventType
    assert _kinds(handle.get_new_events()) == [
        ("new", kinds.CREATE),
        ("new", kinds.CHMOD),
        ("new/f", kinds.CREATE),
        ("new/f", kinds.CHMOD),
        ("new/f", kinds.WRITE),
    ]
    handle.stop()


def test_what_cannot_be_watched(files: Any, url: str, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(InvalidArgumentException, match="not a directory"):
        files.watch_dir(f"{tmp_path}/f")
    with pytest.raises(FileNotFoundException):
        files.watch_dir(f"{tmp_path}/none")
    for method in ("GetWatcherEvents", "RemoveWatcher"):
        status, body = _call(url, method, watcherId="wnone")
        assert (status, body["code"]) == (404, "not_found")


async def test_a_streamed_watch(url: str, tmp_path: Path) -> None:
    sandbox = await AsyncSandbox.create(debug=True, sandbox_url=url)
    events: asyncio.Queue[FilesystemEvent] = asyncio.Queue()
    handle = await sandbox.files.watch_dir(str(tmp_path), events.put, recursive=True, include_entry=True)
    await sandbox.files.write(f"{tmp_path}/d/f", "content")
    told: dict[tuple[str, FilesystemEventType], FilesystemEvent] = {}
    while ("d/f", FilesystemEventType.WRITE) not in told:
        event = await asyncio.wait_for(events.get(), 30)
        told[event.name, event.type] = event
    assert ("d", FilesystemEventType.CREATE) in told
    entry = told["d/f", FilesystemEventType.WRITE].entry
    assert entry is not None
    assert entry.path == f"{tmp_path}/d/f"
    await handle.stop()  # type: ignore[no-untyped-call]
    with pytest.raises(FileNotFoundException):
        await sandbox.files.watch_dir(f"{tmp_path}/none", events.put)


def test_a_stream_with_nothing_to_say_is_kept_alive(url: str, tmp_path: Path) -> None:
    message = json.dumps({"path": str(tmp_path)}).encode()
    headers = {"content-type": "application/connect+json", "keepalive-ping-interval": "1"}
    body = b"\0" + len(message).to_bytes(4, "big") + message
    target = f"{url}/filesystem.Filesystem/WatchDir"
    seen = b""
    with httpx.stream("POST", target, content=body, headers=headers, timeout=30) as answer:
        for chunk in answer.iter_raw():
            seen += chunk
            if b"keepalive" in seen:
                break
    assert seen[5:].startswith(b'{"start":{}}')


def test_descriptors_do_not_pile_up(files: Any, url: str, tmp_path: Path) -> None:
    def count() -> int:
        return len(_call(url, "ListDir", path="/proc/self/fd")[1]["entries"])

    def round_trip() -> None:
        files.watch_dir(str(tmp_path), recursive=True).stop()
        files.write(f"{tmp_path}/f", b"x" * 300_000)
        files.read(f"{tmp_path}/f", gzip=True)
        with files.read(f"{tmp_path}/f", format="stream") as stream:
            next(stream)
        _call(url, "Stat", path=f"{tmp_path}/none")

    round_trip()
    before = count()
    for _ in range(5):
        round_trip()
    assert count() <= before + 1
