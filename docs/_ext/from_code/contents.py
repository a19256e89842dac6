"""The lists of contents of the site: pages that have a place, then every other one of their room."""

from __future__ import annotations

from from_code import markdown

_ROOMS = {
    "": ("tutorial",),
    "Guides": (
        "guides/templates",
        "guides/dockerfile",
        "guides/images",
        "guides/reinforcement-learning",
        "guides/command-line",
        "guides/python-client",
        "guides/network",
        "guides/tls",
        "guides/installation",
        "guides/operations",
        "guides/upgrades",
        "guides/troubleshooting",
        "guides/*",
    ),
    "Reference": (
        "reference/settings",
        "reference/commands",
        "reference/endpoints",
        "reference/errors",
        "reference/python",
        "reference/*",
    ),
    "Explanation": ("explanation/architecture", "explanation/*", "*"),
}


def text() -> str:
    """A list for each room, shown beside the pages only."""
    return "".join(_list(room, pages) for room, pages in _ROOMS.items())


def _list(room: str, pages: tuple[str, ...]) -> str:
    options = [":hidden:", ":glob:", *([f":caption: {room}"] if room else [])]
    return markdown.block("\n".join([*options, "", *pages]), "{toctree}")
