"""The pages as they are, on a forge: links, names of things, and what their blocks may be."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import click
import pytest

from agentenv.cli import cli
from agentenv.config import Settings
from agentenv.host import doctor
from support.pages import DOCS, ROOT, blocks, pages

PAGES = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))

LANGUAGES = {"sh", "python", "console", "toml", "json", "text", "{include} ../CHANGELOG.md"}

# How many blocks of commands in the tutorial and the guides no test runs. Each says why on its page.
NOT_RUN = {
    "guides/dockerfile.md": 1,
    "guides/installation.md": 4,
    "guides/operations.md": 3,
    "guides/python-client.md": 1,
    "guides/shells-and-files.md": 2,
    "guides/templates.md": 1,
    "guides/upgrades.md": 1,
    "tutorial.md": 2,
}

# What pages link to outside: a new one is worth a second look.
SITES = {"e2b.dev"}

SOURCES = [
    file
    for place in ("src", "tests", "bench", "scripts", "examples", ".ci", "pyproject.toml")
    for file in ([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*"))
    if file.suffix in ("", ".py", ".sh", ".toml") and file.is_file()
]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^( *)(`{3,}).*?^ *\2$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def code(page: Path) -> Iterator[str]:
    """What a page has as code, in lines and blocks."""
    yield from re.findall(r"`([^`\n]+)`", prose(page))
    for block in blocks(page):
        yield from block.text.splitlines()


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as forges make them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@cache
def variables() -> set[str]:
    """The variables that there are: of settings, and what else the program reads."""
    others = (re.findall(r"AENV_[A-Z0-9_]+", file.read_text(errors="ignore")) for file in SOURCES)
    return {f"AENV_{name.upper()}" for name in Settings.model_fields} | {
        name for each in others for name in each
    }


def test_all_that_doctor_finds_is_explained(tmp_path: Path) -> None:
    page = (DOCS / "guides/troubleshooting.md").read_text()
    table = page.partition("## What doctor finds")[2].partition("\n## ")[0]
    explained = [
        name
        for row in table.splitlines()
        for name in re.findall(r"`([^`]+)`", row.split("|")[1:2][0] if "|" in row else "")
    ]
    found = [one.name for one in doctor.run(Settings(home=tmp_path))]
    assert set(explained) >= set(found)
    assert len(explained) == len(set(explained))


def test_other_sites_are_named_by_https_and_few() -> None:
    """Whether they answer, `scripts/docs --links` asks."""
    found = {
        (page.relative_to(ROOT), target)
        for page in pages()
        for target in re.findall(r"\]\(([a-z]+:[^)\s]*)\)|<([a-z]+://[^>\s]+)>", prose(page))
        for target in target
        if target
    }
    assert found
    for page, target in found:
        address = urlsplit(target)
        assert address.scheme == "https", f"{page}: {target}"
        assert re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", address.netloc), f"{page}: {target}"
    assert {urlsplit(target).netloc for _, target in found} <= SITES


@PAGES
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{target}: there is no such file"
        if anchor:
            assert anchor in anchors(file), f"{target}: there is no such heading"


def test_pages_that_the_code_names_are_there() -> None:
    named = {
        (file, name)
        for file in SOURCES
        if file != Path(__file__)
        for name in re.findall(r"(?<![\w/.:-])docs/[\w./-]+\.md", file.read_text(errors="ignore"))
    }
    assert named
    missing = [f"{file.relative_to(ROOT)}: {name}" for file, name in named if not (ROOT / name).exists()]
    assert not missing


@PAGES
def test_settings_and_variables_exist(page: Path) -> None:
    settings = {f"AENV_{name.upper()}" for name in Settings.model_fields}
    others = set(
        re.findall(r"AENV_[A-Z0-9_]+", " ".join(file.read_text(errors="ignore") for file in SOURCES))
    )
    named = {name for name in re.findall(r"AENV_[A-Z0-9_]+", page.read_text()) if not name.endswith("_")}
    assert named <= settings | others


@PAGES
def test_commands_exist(page: Path) -> None:
    for line in code(page):
        for words in re.findall(r"(?:^|[ (|&;`])aenv((?: [a-z][a-z-]*)+)", line):
            command: click.Command = cli
            for word in words.split():
                if not isinstance(command, click.Group):
                    break
                found = command.get_command(click.Context(command), word)
                assert found is not None, f"{line}: there is no {word}"
                command = found


@PAGES
def test_blocks_have_a_language_that_is_known(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES


@PAGES
def test_settings_files_can_be(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml" and "[profile" not in block.text:
            Settings(**tomllib.loads(block.text))
        elif block.language == "json":
            json.loads(block.text)


def test_few_blocks_are_not_run_and_they_say_why() -> None:
    marked = [
        block
        for page in pages()
        for block in blocks(page)
        if block.not_run is not None and page.is_relative_to(DOCS)
    ]
    for block in marked:
        assert len(block.not_run or "") > 15, f"{block} has no reason"
    assert Counter(str(block.page.relative_to(DOCS)) for block in marked) == NOT_RUN
