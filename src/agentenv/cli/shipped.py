"""Definitions of templates that come with the project, which `aenv build` knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Shipped:
    """A template's Dockerfile is in `context`; its sandboxes need that many cpus and MiB of memory."""

    name: str
    context: Path
    cpu: int
    memory: int


SHIPPED: Mapping[str, Shipped] = {
    each.name: each for each in (Shipped("code-interpreter-v1", PACKAGE / "interpreter", 2, 2048),)
}


def shipped(path: Path) -> Shipped | None:
    """The definition that is called so, unless there is such a path."""
    return None if path.exists() else SHIPPED.get(str(path))
