"""Any layers that a tool may write unpack to what umoci makes of them."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.image.container import open_layout, unpack_layer
from agentenv.image.streams import decompressed
from agentenv.image.tree import Budget, Tree
from support.archives import Item, Layout, directory, file, hardlink, symlink, tarball
from support.trees import described

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners need root")

KINDS = ("file", "sparse", "directory", "opaque", "link", "hard", "whiteout")
Entries = dict[tuple[str, ...], str]

paths = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(tuple)
layers = st.lists(st.dictionaries(paths, st.sampled_from(KINDS), max_size=6), min_size=1, max_size=4)


def is_directory(kind: str | None) -> bool:
    return kind in ("directory", "opaque")


def whole(entries: Entries) -> Entries:
    """With the directories that lead to each entry, as tools write them; what is below anything else goes."""
    kept = dict(entries)
    for path in entries:
        for length in range(1, len(path)):
            kept.setdefault(path[:length], "directory")
    return {
        path: kind
        for path, kind in kept.items()
        if all(is_directory(kept.get(path[:length])) for length in range(1, len(path)))
    }


def items(entries: Entries, number: int) -> list[Item]:
    """A layer's members in the order of their names; each differs from those of other layers."""
    made: list[Item] = []
    files: list[str] = []
    for path, kind in sorted(entries.items()):
        name, parent = "/".join(path), "/".join(path[:-1])
        owner = {"uid": number, "gid": len(made)}
        if kind == "file" or (kind == "hard" and not files):
            made.append(file(name, name.encode() * (number + 1), mode=0o640 + number, **owner))
            files.append(name)
        elif kind == "sparse":
            made.append(file(name, bytes(9000) + b"x" + bytes(9000), **owner))
        elif kind == "hard":
            made.append(hardlink(name, files[-1]))
        elif kind == "link":
            made.append(symlink(name, f"../{number}", **owner))
        elif kind == "whiteout":
            made.append(file(f"{parent}/.wh.{path[-1]}" if parent else f".wh.{path[-1]}"))
        else:
            made.append(directory(name, mode=0o750 + number, **owner))
            if kind == "opaque":
                made.append(file(f"{name}/.wh..wh..opq"))
    return made


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers)
def test_layers(tmp_path_factory: pytest.TempPathFactory, drawn: list[Entries]) -> None:
    place = tmp_path_factory.mktemp("layers")
    layout = Layout(place / "layout")
    layout.image([tarball(*items(whole(entries), number)) for number, entries in enumerate(drawn)])
    command = ["umoci", "unpack", "--image", f"{layout.directory}:latest", str(place / "bundle")]
    subprocess.run(command, check=True, capture_output=True)
    assert unpacked(layout, place) == described(place / "bundle/rootfs", times=False)


def unpacked(layout: Layout, place: Any) -> dict[str, tuple[Any, ...]]:
    image = open_layout(layout.directory, None, None, lambda: None)
    (place / "tree").mkdir()
    tree = Tree(place / "tree", Budget(1 << 30))
    for layer in image.layers:
        with layer.open() as packed, decompressed(packed) as stream:
            unpack_layer(layer, stream, tree)
    return described(place / "tree", times=False)
