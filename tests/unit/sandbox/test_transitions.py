"""Every cell of the tables of a sandbox's life."""

from __future__ import annotations

import pytest

from agentenv.errors import Conflict, NotFound
from agentenv.sandbox.transitions import (
    ENDS,
    REACHABLE,
    RECOVERIES,
    SETTLEMENTS,
    SHOWN,
    TRANSITIONS,
    Enter,
    Join,
    Operation,
    Outcome,
    Refuse,
    State,
    Stay,
    Wait,
    decide,
    recover,
    settle,
)

# Written out a second time, by hand and in another form, so that a slip in one of them shows:
# w waits, j joins, - stays, N and C refuse (not found, conflict), anything else is the state entered.
CELLS = """
            creating running       pausing paused   resuming checkpointing forking killing killed failed
kill        w        killing       w       killing  w        w             w       j       N      N
pause       w        pausing       j       C        w        w             w       N       N      N
connect     w        -             w       resuming w        -             -       C       N      N
timeout     w        -             w       C        w        -             -       N       N      N
checkpoint  w        checkpointing w       -        w        w             w       N       N      N
fork        w        forking       w       -        w        w             w       N       N      N
rollback    w        resuming      w       resuming w        w             w       N       N      N
refresh     w        checkpointing w       C        w        w             w       N       N      N
limit       w        -             w       -        w        w             w       N       N      N
network     w        -             w       -        w        -             -       N       N      N
"""

OUTCOMES = """
            creating running pausing paused resuming checkpointing forking killing killed failed
done        running  .       paused  .      running  running       running killed  .      .
undone      failed   .       running .      paused   running       running killing .      .
lost        failed   .       failed  .      failed   failed        failed  killed  .      .
died        .        failed  .       .      .        .             .       .       .      .
"""

AT_START = """
            creating running pausing paused resuming checkpointing forking killing killed failed
alive       failed   running running paused paused   running       running killed  killed failed
gone        failed   failed  failed  paused paused   failed        failed  killed  killed failed
"""


def cells(table: str) -> list[tuple[str, State, str]]:
    head, *rows = (line.split() for line in table.strip().splitlines())
    return [(row[0], State(state), cell) for row in rows for state, cell in zip(head, row[1:], strict=True)]


@pytest.mark.parametrize(("operation", "state", "cell"), cells(CELLS))
def test_an_operation_in_a_state(operation: str, state: State, cell: str) -> None:
    verdict = decide(Operation(operation), state)
    if cell in "NC":
        assert isinstance(verdict, Refuse)
        assert verdict.error is {"N": NotFound, "C": Conflict}[cell]
        assert verdict.reason
    else:
        expected = {"w": Wait(), "j": Join(), "-": Stay()}
        assert verdict == (expected[cell] if cell in expected else Enter(State(cell)))


@pytest.mark.parametrize(("outcome", "state", "cell"), cells(OUTCOMES))
def test_an_outcome_in_a_state(outcome: str, state: State, cell: str) -> None:
    if cell == ".":
        with pytest.raises(AssertionError, match="cannot happen"):
            settle(Outcome(outcome), state)
    else:
        assert settle(Outcome(outcome), state) is State(cell)


@pytest.mark.parametrize(("machine", "state", "cell"), cells(AT_START))
def test_a_record_found_at_the_start(machine: str, state: State, cell: str) -> None:
    assert recover(state, alive=machine == "alive") is State(cell)


def test_the_tables_are_complete() -> None:
    assert set(TRANSITIONS) == set(Operation)
    assert set(SETTLEMENTS) == set(Outcome)
    states = [set(row) for row in TRANSITIONS.values()] + [set(row) for row in SETTLEMENTS.values()]
    assert all(row == set(State) for row in [*states, set(RECOVERIES)])
    assert len(cells(CELLS)) == len(Operation) * len(State)


def test_every_state_that_is_entered_comes_to_an_end() -> None:
    """What an operation enters, each of its outcomes leaves, but for a kill that is to be repeated."""
    entered = {v.state for row in TRANSITIONS.values() for v in row.values() if isinstance(v, Enter)}
    for state in entered | {State.CREATING}:
        assert settle(Outcome.DONE, state) is not state
        assert settle(Outcome.LOST, state) in ENDS


def test_ends_are_neither_reached_nor_shown() -> None:
    assert not ENDS & REACHABLE
    assert not ENDS & set(SHOWN)
    assert set(SHOWN) >= REACHABLE
    assert all(isinstance(row[state], Refuse) for row in TRANSITIONS.values() for state in ENDS)
