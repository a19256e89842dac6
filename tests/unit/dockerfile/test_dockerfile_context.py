"""The build context: sources, patterns, links that stay inside, `.dockerignore`."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from agentenv.dockerfile.context import Context
from agentenv.errors import InvalidRequest, NotFound


def fill(root: Path, *files: str) -> Path:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def names(context: Context, source: str) -> list[tuple[str, bool]]:
    return [(found.path, found.directory) for found in context.find(source)]


def tree(context: Context, source: str = ".") -> list[str]:
    (found,) = context.find(source)
    return [entry.name.removeprefix("t/") for entry in context.tree(found, "t")]


def test_sources(tmp_path: Path) -> None:
    context = Context(fill(tmp_path, "a.txt", "b.txt", "c.md", "d/x", "d/e/y", ".hidden.txt"))
    assert names(context, "a.txt") == [("a.txt", False)]
    assert names(context, "./d/") == [("d", True)]
    assert names(context, "*.txt") == [(".hidden.txt", False), ("a.txt", False), ("b.txt", False)]
    assert names(context, "d/*/y") == [("d/e/y", False)]
    assert names(context, "[ab].txt") == [("a.txt", False), ("b.txt", False)]
    assert names(context, "*.none") == []
    assert names(context, "/a.txt") == names(context, "../../a.txt") == [("a.txt", False)]
    assert tree(context, "d") == ["e", "e/y", "x"]
    with pytest.raises(NotFound, match="no such file"):
        context.find("nothing")


def test_links_that_are_sources_are_followed_inside_the_context_only(tmp_path: Path) -> None:
    root = fill(tmp_path / "context", "real/file", "etc/passwd")
    fill(tmp_path, "secret")
    (root / "link").symlink_to("real/file")
    (root / "climbs").symlink_to("../../../etc/passwd")
    (root / "absolute").symlink_to("/etc/passwd")
    (root / "away").symlink_to("../secret")
    (root / "dirlink").symlink_to("real")
    (root / "loop").symlink_to("loop")
    context = Context(root)
    assert names(context, "link") == [("real/file", False)]
    assert context.find("link")[0].name == "link"
    assert names(context, "climbs") == names(context, "absolute") == [("etc/passwd", False)]
    assert names(context, "dirlink") == [("real", True)]
    assert names(context, "dirlink/file") == [("real/file", False)]
    for gone in ("away", "loop"):
        with pytest.raises(NotFound):
            context.find(gone)


def test_links_in_a_directory_stay_links(tmp_path: Path) -> None:
    root = fill(tmp_path, "d/file")
    (root / "d/link").symlink_to("../../nowhere")
    context = Context(root)
    entries = {entry.name: entry for entry in context.tree(context.find("d")[0], "t")}
    assert (entries["t/link"].kind, entries["t/link"].target) == ("link", "../../nowhere")


def test_what_is_no_file_is_passed_over_and_told(tmp_path: Path) -> None:
    root = fill(tmp_path, "d/file")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "d/socket"))
        os.mkfifo(root / "d/fifo")
        context = Context(root)
        assert tree(context, "d") == ["file"]
    assert context.skipped == ["d/fifo", "d/socket"]
    with pytest.raises(NotFound, match="neither a file"):
        context.find("d/fifo")


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (
            ["*.log"],
            ["keep.txt", "node_modules", "node_modules/pkg", "node_modules/pkg/a.js", "sub", "sub/b.log"],
        ),
        (["**/*.log"], ["keep.txt", "node_modules", "node_modules/pkg", "node_modules/pkg/a.js", "sub"]),
        (["node_modules", "sub/"], ["a.log", "keep.txt"]),
        (["/node_modules", "# comment", "", "sub"], ["a.log", "keep.txt"]),
        (["*", "!keep.txt"], ["keep.txt"]),
        (
            ["node_modules", "sub", "!node_modules/pkg/a.js"],
            ["a.log", "keep.txt", "node_modules", "node_modules/pkg", "node_modules/pkg/a.js"],
        ),
        (["!keep.txt", "*"], []),
        (["**", "!sub/b.log"], ["sub", "sub/b.log"]),
        (["*", "!sub", "sub/b.log"], ["sub"]),
    ],
)
def test_dockerignore(tmp_path: Path, ignore: list[str], left: list[str]) -> None:
    context = Context(fill(tmp_path, "a.log", "keep.txt", "node_modules/pkg/a.js", "sub/b.log"), ignore)
    assert tree(context) == left


def test_an_ignored_source_says_so(tmp_path: Path) -> None:
    context = Context(fill(tmp_path, "a.log", "b.log"), ["a.log"])
    with pytest.raises(NotFound, match="left out of the context by"):
        context.find("a.log")
    assert names(context, "*.log") == [("b.log", False)]


def test_where_the_patterns_are_read(tmp_path: Path) -> None:
    root = fill(tmp_path / "context", "a", "b")
    dockerfile = tmp_path / "Custom"
    (root / ".dockerignore").write_bytes(b"\xef\xbb\xbfa\r\n")
    assert tree(Context.of(root, dockerfile)) == [".dockerignore", "b"]
    (tmp_path / "Custom.dockerignore").write_text("b\n.*")
    assert tree(Context.of(root, dockerfile)) == ["a"]


def test_what_cannot_be_a_context(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is not a directory"):
        Context(tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match="dockerignore"):
        Context(tmp_path, ["[a"])
