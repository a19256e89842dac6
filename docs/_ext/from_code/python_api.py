"""The reference of the Python client, from its signatures and docstrings."""

from __future__ import annotations


def text() -> str:
    """Nothing yet."""
    return ""
