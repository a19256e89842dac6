"""What several parts of the reference look for in the program: its modules, its errors."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import agentenv
from agentenv.errors import AenvError

# What runs inside a guest: it imports nothing of the rest, raises no error of the tree, and may want packages
# that only a guest has.
_ELSEWHERE = ("agentenv.guest.", "agentenv.interpreter.", "agentenv.building.programs.", "agentenv.__main__")


@cache
def modules() -> tuple[ModuleType, ...]:
    """Every module of the program that a node or a client runs, imported."""
    found = pkgutil.walk_packages(agentenv.__path__, "agentenv.")
    return tuple(
        importlib.import_module(each.name) for each in found if not f"{each.name}.".startswith(_ELSEWHERE)
    )


def errors() -> list[type[AenvError]]:
    """Every class of the error tree, each after the one it is a kind of."""
    modules()
    return list(_below(AenvError))


def _below(kind: type[AenvError]) -> Iterator[type[AenvError]]:
    yield kind
    for each in sorted(kind.__subclasses__(), key=lambda one: (one.status, one.__name__, one.__module__)):
        yield from _below(each)
