"""The documentation as a site: strict, with a reference that has all there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.config import Settings
from support.pages import DOCS, ROOT


def build(source: Path, target: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """What scripts/docs runs, beside it."""
    strict = ["-q", "-W", "--keep-going", "-n", "-b", "html", "-c", str(DOCS), "-d", str(target / "doctrees")]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *strict, *more, str(source), str(target / "html")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site: no warning, so every page is in a list of contents and every link leads somewhere."""
    target = tmp_path_factory.mktemp("site")
    built = build(DOCS, target)
    assert built.returncode == 0, built.stderr
    return target / "html"


def test_every_page_is_built(site: Path) -> None:
    sources = {page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")}
    pages = {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")}
    assert sources <= pages


def test_every_setting_has_a_place_of_its_own(site: Path) -> None:
    page = (site / "reference" / "settings.html").read_text()
    for name in Settings.model_fields:
        assert f'id="setting-{name.replace("_", "-")}"' in page


def test_what_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "index.md").write_text(
        "# A\n\n[file](none.md), [heading](#none), [there](b.md#none), [b](b.md#b)\n"
    )
    (source / "b.md").write_text("# B\n")
    built = build(source, tmp_path, "-D", "extensions=myst_parser")  # the reference takes time
    assert built.returncode != 0
    assert built.stderr.count("WARNING") == 4  # three links, and b.md in no list of contents
