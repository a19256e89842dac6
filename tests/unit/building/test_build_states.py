"""The table of a build's life, every cell of it."""

from __future__ import annotations

import itertools

import pytest

from agentenv.errors import Conflict
from agentenv.template.states import ENDS, SHOWN, TRANSITIONS, BuildState, Event, after


@pytest.mark.parametrize(("state", "event"), list(itertools.product(BuildState, Event)))
def test_every_cell(state: BuildState, event: Event) -> None:
    following = TRANSITIONS.get((state, event))
    if following is None:
        with pytest.raises(Conflict, match=f"{state} cannot {event}"):
            after(state, event)
    else:
        assert after(state, event) is following


def test_ends_are_ends_and_everything_ends() -> None:
    assert {state for state, _ in TRANSITIONS} == set(BuildState) - ENDS
    for state in set(BuildState) - ENDS:
        assert after(state, Event.FAIL) in ENDS and after(state, Event.CANCEL) in ENDS
    assert set(TRANSITIONS.values()) == set(BuildState) - {BuildState.WAITING}


def test_clients_know_all_that_is_shown() -> None:
    assert set(SHOWN) == set(BuildState)
    assert set(SHOWN.values()) == {"waiting", "building", "ready", "error"}
