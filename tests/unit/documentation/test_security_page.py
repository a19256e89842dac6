"""Every promise of the page on security names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_each_promise_has_its_test() -> None:
    page = (ROOT / "docs/explanation/security.md").read_text()
    cells = [line.rsplit("|", 2)[1] for line in page.splitlines() if re.match(r"\| .*`.*\|$", line)]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    files = list((ROOT / "tests").rglob("test_*.py"))
    tests = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    known = "\n".join([*tests, *(file.stem for file in files)])
    assert len(named) > 40
    assert sorted(name for name in named if name not in known) == []
