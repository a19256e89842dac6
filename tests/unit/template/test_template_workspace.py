"""When a system is installed in memory."""

from __future__ import annotations

import os

import pytest

from agentenv.template import workspace
from agentenv.template.workspace import Memory, available_memory, suits

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "answer"),
    [
        (Memory(2 * GIB, 4 * GIB, os.ST_NOSUID | os.ST_NODEV), True),
        (Memory(64 << 20, 4 * GIB, 0), False),  # a container's
        (Memory(2 * GIB, 2 * GIB, 0), False),
        (Memory(2 * GIB, 4 * GIB, os.ST_NOEXEC), False),
    ],
)
def test_suits(memory: Memory, answer: bool) -> None:
    assert suits(memory) is answer


def test_available_memory() -> None:
    assert available_memory("MemTotal: 9 kB\nMemAvailable:    2048 kB\n") == 2 << 20
    assert available_memory("") == 0


def test_each_build_has_its_own_place() -> None:
    places = {workspace.in_memory("a"), workspace.in_memory("b")}
    assert len(places) == 2 or places == {None}
