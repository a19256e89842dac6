"""Every command and every program of the tutorial and the guides, typed in order by one reader a page."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pages import DOCS, ROOT, Block, Reader, blocks
from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

RUN = ("sh", "python", "console")
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "guides").glob("*.md"))]


def typed(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in RUN and block.not_run is None]


@pytest.fixture
def reader(node: RunningNode, tmp_path: Path) -> Iterator[Reader]:
    """At home in an empty directory, with the environment that an installation makes, and knowing no node."""
    directory = tmp_path / "reader"
    directory.mkdir()
    (directory / ".venv").symlink_to(sys.prefix)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"HOME": str(directory), "PATH": programs, "PYTHONPATH": str(ROOT / "src")}
    left = {name: value for name, value in node.environment.items() if not name.startswith("E2B_")}
    reader = Reader(directory, {**left, **own})
    yield reader
    reader.close()


@pytest.fixture
def nothing_left(node: RunningNode) -> Iterator[None]:
    """A page leaves no sandbox, template or snapshot behind."""
    before = things(node)
    yield
    left = things(node) - before
    with node.client() as client:
        for path in sorted(left):
            client.delete(path).raise_for_status()
    assert not left


def things(node: RunningNode) -> set[str]:
    """What there is that a call deletes, by its path; sandboxes first."""
    with node.client() as client:
        kinds = {"/sandboxes/": ("/v2/sandboxes", "sandboxID"), "/templates/": ("/templates", "templateID")}
        found = {
            f"{path}{each[key]}"
            for path, (listed, key) in kinds.items()
            for each in client.get(listed).raise_for_status().json()
        }
        snapshots = client.get("/snapshots").raise_for_status().json()
        return found | {f"/templates/{each['snapshotID']}" for each in snapshots}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("page", [each for each in PAGES if typed(each)], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, reader: Reader) -> None:
    for block in typed(page):
        reader.type(block)
