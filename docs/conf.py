"""How the documentation becomes a site: `scripts/docs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from agentenv import __version__

project = "AgentENV"
author = "the authors of AgentENV"
version = release = __version__

extensions = ["myst_parser", "from_code"]
exclude_patterns = ["_build", "_ext"]

# Links as a forge resolves them: to files, and to headings by their words.
myst_heading_anchors = 4
nitpicky = True

html_theme = "furo"
html_title = f"AgentENV {version}"
html_show_copyright = False
html_copy_source = False
