"""Phases of an operation, timed by a counter that steps."""

from __future__ import annotations

import itertools

import pytest

from agentenv.sandbox.phases import Phases


def stepping(milliseconds: float = 1.0) -> Phases:
    ticks = itertools.count()
    return Phases("create", "i1", counter=lambda: next(ticks) * milliseconds / 1e3)


def test_phases_are_kept_in_order_with_their_times() -> None:
    phases = stepping()
    with phases("slot"):
        pass
    with phases("boot"):
        pass
    phases.finish()
    assert [(phase.name, phase.failed) for phase in phases.ended] == [("slot", False), ("boot", False)]
    assert phases.header() == "slot;dur=1.0, boot;dur=1.0, total;dur=5.0"
    assert phases.header() == phases.header()  # the total stands still


def test_a_failed_phase_is_kept_and_its_error_goes_on() -> None:
    phases = stepping()
    with pytest.raises(ZeroDivisionError), phases("boot"):
        raise ZeroDivisionError
    assert [(phase.name, phase.failed) for phase in phases.ended] == [("boot", True)]


def test_as_text_it_is_short() -> None:
    phases = stepping(10)
    with phases("slot"):
        pass
    phases.finish()
    assert str(phases) == "30 ms (slot 10)"
