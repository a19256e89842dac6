"""What the sandbox service tells those who watch it. It needs none of them and waits for none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from agentenv.sandbox.phases import Phases
from agentenv.sandbox.records import Sandbox


class Change(StrEnum):
    """What can happen to a sandbox. `KILLED`, `EXPIRED` and `FAILED` are ends."""

    CREATED = "created"
    PAUSED = "paused"
    RESUMED = "resumed"
    CHECKPOINTED = "checkpointed"
    FORKED = "forked"
    ROLLED_BACK = "rolled_back"
    REFRESHED = "refreshed"
    UPDATED = "updated"
    STALLED = "stalled"
    PAUSE_FAILED = "pause_failed"
    CHECKPOINT_FAILED = "checkpoint_failed"
    RESUME_FAILED = "resume_failed"
    KILLED = "killed"
    EXPIRED = "expired"
    FAILED = "failed"


ENDINGS = frozenset({Change.KILLED, Change.EXPIRED, Change.FAILED})


@dataclass(frozen=True)
class Happening:
    """Something that happened to a sandbox, whose record is as it is after it; `at` is in seconds since the
    epoch. `detail` says more in short texts, such as the reason of a failure."""

    change: Change
    sandbox: Sandbox
    at: float
    detail: Mapping[str, str] = field(default_factory=dict)


class Running(NamedTuple):
    """A sandbox with a machine, as far as its figures are read."""

    sandbox: Sandbox
    pid: int
    address: str
    veth: str
    busy: bool


class Observer:
    """Told what goes on, in the order in which it does. What it does must be quick and cannot fail; here it
    does nothing."""

    def happened(self, happening: Happening) -> None:
        """Something happened to a sandbox."""

    def finished(self, phases: Phases) -> None:
        """An operation succeeded, and took that long."""

    def ended(self, operation: str, error: BaseException | None) -> None:
        """An operation is over: with `error`, it did not succeed."""

    def wrote(self, sandbox_id: str, data: bytes) -> None:
        """A guest wrote to its console."""


class Observers(Observer):
    """Passes everything on."""

    def __init__(self) -> None:
        self._all: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Tell `observer` too, from now on."""
        self._all.append(observer)

    def happened(self, happening: Happening) -> None:
        for each in self._all:
            each.happened(happening)

    def finished(self, phases: Phases) -> None:
        for each in self._all:
            each.finished(phases)

    def ended(self, operation: str, error: BaseException | None) -> None:
        for each in self._all:
            each.ended(operation, error)

    def wrote(self, sandbox_id: str, data: bytes) -> None:
        for each in self._all:
            each.wrote(sandbox_id, data)
