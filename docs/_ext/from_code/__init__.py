"""A Sphinx extension of ours: fills the reference from the code while the site is built.

A page asks for a part with a comment of its own line, `<!-- the site has here: settings -->`, which the
part's Markdown takes the place of. So pages stay readable where nothing is built, and what is generated
is on no record that could be behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from from_code import commands, contents, endpoints, errors, python_api, settings

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PARTS: dict[str, Callable[[], str]] = {
    "commands": commands.text,
    "contents": contents.text,
    "endpoints": endpoints.text,
    "errors": errors.text,
    "python": python_api.text,
    "settings": settings.text,
}

_ASKED = re.compile(r"^<!-- the site has here: (.*) -->$", re.MULTILINE)


def filled(page: str) -> str:
    """The page with the parts that it asks for.

    Raises:
        KeyError: there is no such part.
    """
    return _ASKED.sub(lambda found: PARTS[found[1]](), page)


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx; a page that asks for parts is read anew at each build."""

    def read(app: Sphinx, docname: str, source: list[str]) -> None:
        if _ASKED.search(source[0]):
            source[0] = filled(source[0])
            app.env.note_reread()

    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
