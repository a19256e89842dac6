"""What a kernel does before it has a user, in this process."""

from __future__ import annotations

import random

import numpy

from agentenv.interpreter import rehearsal


def drawn() -> tuple[float, float]:
    return random.random(), float(numpy.random.rand())


def test_what_comes_out_of_one_snapshot_draws_other_numbers() -> None:
    kept = random.getstate(), numpy.random.get_state()
    try:
        first = drawn()
        random.setstate(kept[0])
        numpy.random.set_state(kept[1])
        assert drawn() == first
        random.setstate(kept[0])
        numpy.random.set_state(kept[1])
        rehearsal.inherit()
        assert not set(drawn()) & set(first)
    finally:
        random.setstate(kept[0])
        numpy.random.set_state(kept[1])
