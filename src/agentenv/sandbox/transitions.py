"""The life of a sandbox as data: what each operation and each event means in each state.

Nothing here has an effect. The service asks `decide` before an operation, `settle` after one and
`recover` for each record it finds at its start, commits the state it is told, and only then acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agentenv.errors import AenvError, Conflict, NotFound


class State(StrEnum):
    """Where a sandbox is in its life. `KILLED` and `FAILED` are ends."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    CHECKPOINTING = "checkpointing"
    FORKING = "forking"
    KILLING = "killing"
    KILLED = "killed"
    FAILED = "failed"


class Operation(StrEnum):
    """What can be asked of a sandbox that exists. Expiry asks like a client does."""

    KILL = "kill"
    PAUSE = "pause"
    CONNECT = "connect"
    TIMEOUT = "timeout"
    CHECKPOINT = "checkpoint"
    FORK = "fork"
    ROLLBACK = "rollback"
    REFRESH = "refresh"
    LIMIT = "limit"
    NETWORK = "network"


class Outcome(StrEnum):
    """How an operation ended, or that a machine did so by itself."""

    DONE = "done"
    UNDONE = "undone"  # it failed; what was there before is there again, really
    LOST = "lost"  # it failed and nothing is left to go on with
    DIED = "died"  # no operation was under way and the machine ended


@dataclass(frozen=True)
class Enter:
    """Commit this state, then carry the operation out."""

    state: State


@dataclass(frozen=True)
class Stay:
    """Carry the operation out without leaving the state."""


@dataclass(frozen=True)
class Wait:
    """Another operation is under way: ask again when it has ended."""


@dataclass(frozen=True)
class Join:
    """The same operation is under way: its result is this caller's too."""


@dataclass(frozen=True)
class Refuse:
    """No, and why; the reason follows the words "sandbox ID"."""

    error: type[AenvError]
    reason: str


Verdict = Enter | Stay | Wait | Join | Refuse

_GONE = Refuse(NotFound, "doesn't exist or you don't have access to it")
_ENDING = Refuse(NotFound, "is being killed")

S = State

TRANSITIONS: dict[Operation, dict[State, Verdict]] = {
    Operation.KILL: {
        S.CREATING: Wait(),
        S.RUNNING: Enter(S.KILLING),
        S.PAUSING: Wait(),
        S.PAUSED: Enter(S.KILLING),
        S.RESUMING: Wait(),
        S.CHECKPOINTING: Wait(),
        S.FORKING: Wait(),
        S.KILLING: Join(),
        S.KILLED: _GONE,
        S.FAILED: _GONE,
    },
    Operation.PAUSE: {
        S.CREATING: Wait(),
        S.RUNNING: Enter(S.PAUSING),
        S.PAUSING: Join(),
        S.PAUSED: Refuse(Conflict, "is already paused"),
        S.RESUMING: Wait(),
        S.CHECKPOINTING: Wait(),
        S.FORKING: Wait(),
        S.KILLING: _ENDING,
        S.KILLED: _GONE,
        S.FAILED: _GONE,
    },
    Operation.CONNECT: {
        S.CREATING: Wait(),
        S.RUNNING: Stay(),
        S.PAUSING: Wait(),
        S.PAUSED: Enter(S.RESUMING),
        S.RESUMING: Wait(),
        S.CHECKPOINTING: Stay(),
        S.FORKING: Stay(),
        S.KILLING: Refuse(Conflict, "is being killed"),
        S.KILLED: _GONE,
        S.FAILED: _GONE,
    },
    Operation.TIMEOUT: {
        S.CREATING: Wait(),
        S.RUNNING: Stay(),
        S.PAUSING: Wait(),
        S.PAUSED: Refuse(Conflict, "is paused: connect to it first"),
        S.RESUMING: Wait(),
        S.CHECKPOINTING: Stay(),
        S.FORKING: Stay(),
        S.KILLING: _ENDING,
        S.KILLED: _GONE,
        S.FAILED: _GONE,
    },
    Operation.CHECKPOINT: {
        S.CREATING: Wait(),
        S.RUNNING: Enter(S.CHECKPOINTING),
        S.PAUSING: Wait(),
        S.PAUSED: Stay(),  # what it was paused into is a snapshot already
        S.RESUMING: Wait(),
        S.CHECKPOINTING: Wait(),
        S.FORKING: Wait(),
        S.KILLING: _ENDING,
        S.KILLED: _GONE,
        S.FAILED: _GONE,
    },
    Operation.FORK: {
        S.CREATING: Wait(),
        S.RUNNING: Enter(S.FORKING),
        S.PAUSING: Wait(),
        S.PAUSED: Stay(),
        S.RESUMING: Wait(),
        S.CHECKPOINTING: Wait(),
        S.FORKING: Wait(),
        S.KILLING: _ENDING,
        S.KILLED: _GONE,
        S.FAILED: _GONE,
    },
    # A rollback is a resume from another snapshot; one that fails leaves the sandbox paused there.
    Operation.ROLLBACK: {
        S.CREATING: Wait(),
        S.RUNNING: Enter(S.RESUMING),
        S.PAUSING: Wait(),
        S.PAUSED: Enter(S.RESUMING),
        S.RESUMING: Wait(),
        S.CHECKPOINTING: Wait(),
        S.FORKING: Wait(),
        S.KILLING: _ENDING,
        S.KILLED: _GONE,
        S.FAILED: _GONE,
    },
    # A refresh is a checkpoint and then a rollback to it, without anybody getting a turn in between.
    Operation.REFRESH: {
        S.CREATING: Wait(),
        S.RUNNING: Enter(S.CHECKPOINTING),
        S.PAUSING: Wait(),
        S.PAUSED: Refuse(Conflict, "is paused: it holds no memory"),
        S.RESUMING: Wait(),
        S.CHECKPOINTING: Wait(),
        S.FORKING: Wait(),
        S.KILLING: _ENDING,
        S.KILLED: _GONE,
        S.FAILED: _GONE,
    },
    Operation.LIMIT: {
        S.CREATING: Wait(),
        S.RUNNING: Stay(),
        S.PAUSING: Wait(),
        S.PAUSED: Stay(),  # in force when it is resumed
        S.RESUMING: Wait(),
        S.CHECKPOINTING: Wait(),
        S.FORKING: Wait(),
        S.KILLING: _ENDING,
        S.KILLED: _GONE,
        S.FAILED: _GONE,
    },
    # Of a paused one the record changes; its next start has the rules in force before it runs.
    Operation.NETWORK: {
        S.CREATING: Wait(),
        S.RUNNING: Stay(),
        S.PAUSING: Wait(),
        S.PAUSED: Stay(),
        S.RESUMING: Wait(),
        S.CHECKPOINTING: Stay(),
        S.FORKING: Stay(),
        S.KILLING: _ENDING,
        S.KILLED: _GONE,
        S.FAILED: _GONE,
    },
}

# None: cannot be. DIED is asked only between operations; during one, the operation itself sees it.
SETTLEMENTS: dict[Outcome, dict[State, State | None]] = {
    Outcome.DONE: {
        S.CREATING: S.RUNNING,
        S.RUNNING: None,
        S.PAUSING: S.PAUSED,
        S.PAUSED: None,
        S.RESUMING: S.RUNNING,
        S.CHECKPOINTING: S.RUNNING,
        S.FORKING: S.RUNNING,
        S.KILLING: S.KILLED,
        S.KILLED: None,
        S.FAILED: None,
    },
    Outcome.UNDONE: {
        S.CREATING: S.FAILED,
        S.RUNNING: None,
        S.PAUSING: S.RUNNING,
        S.PAUSED: None,
        S.RESUMING: S.PAUSED,
        S.CHECKPOINTING: S.RUNNING,
        S.FORKING: S.RUNNING,
        S.KILLING: S.KILLING,  # what could not be ended is tried again
        S.KILLED: None,
        S.FAILED: None,
    },
    Outcome.LOST: {
        S.CREATING: S.FAILED,
        S.RUNNING: None,
        S.PAUSING: S.FAILED,
        S.PAUSED: None,
        S.RESUMING: S.FAILED,
        S.CHECKPOINTING: S.FAILED,
        S.FORKING: S.FAILED,
        S.KILLING: S.KILLED,
        S.KILLED: None,
        S.FAILED: None,
    },
    Outcome.DIED: {
        S.CREATING: None,
        S.RUNNING: S.FAILED,
        S.PAUSING: None,
        S.PAUSED: None,
        S.RESUMING: None,
        S.CHECKPOINTING: None,
        S.FORKING: None,
        S.KILLING: None,
        S.KILLED: None,
        S.FAILED: None,
    },
}

# What a starting node makes of a record: (its machine still runs, it does not).
RECOVERIES: dict[State, tuple[State, State]] = {
    S.CREATING: (S.FAILED, S.FAILED),  # never answered: nobody knows its id
    S.RUNNING: (S.RUNNING, S.FAILED),
    S.PAUSING: (S.RUNNING, S.FAILED),
    S.PAUSED: (S.PAUSED, S.PAUSED),
    S.RESUMING: (S.PAUSED, S.PAUSED),
    S.CHECKPOINTING: (S.RUNNING, S.FAILED),
    S.FORKING: (S.RUNNING, S.FAILED),
    S.KILLING: (S.KILLED, S.KILLED),
    S.KILLED: (S.KILLED, S.KILLED),
    S.FAILED: (S.FAILED, S.FAILED),
}

ENDS = frozenset({S.KILLED, S.FAILED})

# The guest is there and its services are reached, though its vcpus may stop for a moment.
REACHABLE = frozenset({S.RUNNING, S.CHECKPOINTING, S.FORKING})

# What clients are told: E2B knows two states. States without an entry are not shown in lists.
SHOWN: dict[State, str] = {
    S.RUNNING: "running",
    S.CHECKPOINTING: "running",
    S.FORKING: "running",
    S.RESUMING: "running",
    S.PAUSING: "paused",
    S.PAUSED: "paused",
}


def decide(operation: Operation, state: State) -> Verdict:
    """What asking for `operation` in `state` leads to."""
    return TRANSITIONS[operation][state]


def settle(outcome: Outcome, state: State) -> State:
    """The state after `state` when its operation came out like that."""
    following = SETTLEMENTS[outcome][state]
    assert following is not None, f"{outcome} cannot happen in {state}"
    return following


def recover(state: State, *, alive: bool) -> State:
    """The state that a node gives a record it finds at its start."""
    return RECOVERIES[state][0 if alive else 1]
