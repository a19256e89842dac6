"""Every command and every program of the tutorial and the guides, typed in order by one reader a page."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.pages import DOCS, ROOT, Block, Reader, blocks
from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

RUN = ("sh", "python", "console")
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "guides").glob("*.md"))]


def typed(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in RUN and block.not_run is None]


@pytest.fixture(scope="module")
def documented(node_factory: Callable[..., RunningNode]) -> RunningNode:
    """The node of all pages."""
    return node_factory("documented")


@pytest.fixture
def reader(documented: RunningNode, tmp_path: Path) -> Iterator[Reader]:
    """At home in an empty directory, with the environment that an installation makes, and knowing no node."""
    directory = tmp_path / "reader"
    directory.mkdir()
    (directory / ".venv").symlink_to(sys.prefix)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"HOME": str(directory), "PATH": programs, "PYTHONPATH": str(ROOT / "src")}
    left = {name: value for name, value in documented.environment.items() if not name.startswith("E2B_")}
    reader = Reader(directory, {**left, **own})
    yield reader
    reader.close()


@pytest.mark.parametrize("page", [each for each in PAGES if typed(each)], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, reader: Reader, documented: RunningNode) -> None:
    for block in typed(page):
        reader.type(block)
    with documented.client() as client:
        left = client.get("/v2/sandboxes").raise_for_status().json()
        for each in left:
            client.delete(f"/sandboxes/{each['sandboxID']}").raise_for_status()
    assert not left, f"{page.name} leaves sandboxes behind"
