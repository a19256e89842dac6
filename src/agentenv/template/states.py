"""The life of a build as data: which event leads from which state to which."""

from __future__ import annotations

from enum import StrEnum

from agentenv.errors import Conflict


class BuildState(StrEnum):
    """Where a build is in its life; the last three are ends."""

    WAITING = "waiting"  # asked for, and not yet told what it is to be made of
    BUILDING = "building"
    READY = "ready"
    ERROR = "error"
    CANCELLED = "cancelled"


class Event(StrEnum):
    """What happens to a build."""

    START = "start"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


ENDS = frozenset({BuildState.READY, BuildState.ERROR, BuildState.CANCELLED})

TRANSITIONS: dict[tuple[BuildState, Event], BuildState] = {
    (BuildState.WAITING, Event.START): BuildState.BUILDING,
    (BuildState.WAITING, Event.FAIL): BuildState.ERROR,
    (BuildState.WAITING, Event.CANCEL): BuildState.CANCELLED,
    (BuildState.BUILDING, Event.FINISH): BuildState.READY,
    (BuildState.BUILDING, Event.FAIL): BuildState.ERROR,
    (BuildState.BUILDING, Event.CANCEL): BuildState.CANCELLED,
}

# As E2B's clients know them.
SHOWN = {
    BuildState.WAITING: "waiting",
    BuildState.BUILDING: "building",
    BuildState.READY: "ready",
    BuildState.ERROR: "error",
    BuildState.CANCELLED: "error",
}


def after(state: BuildState, event: Event) -> BuildState:
    """The state that follows.

    Raises:
        Conflict: the event cannot happen in that state.
    """
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise Conflict(f"a build that is {state} cannot {event}")
    return following
