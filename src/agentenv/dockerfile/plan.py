"""What a Dockerfile comes to: stages of steps, in the words of E2B's build API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agentenv.dockerfile.bundle import Bundle

StepType = Literal["RUN", "COPY", "ENV", "WORKDIR", "USER"]


@dataclass(frozen=True)
class Image:
    """A container image, by reference."""

    reference: str


@dataclass(frozen=True)
class Template:
    """A template of the node, by name or id."""

    reference: str


@dataclass(frozen=True)
class StageOutput:
    """The files that another stage of the same Dockerfile ends with."""

    index: int


Origin = Image | Template | StageOutput


@dataclass(frozen=True)
class Step:
    """One step of a build.

    Attributes:
        type: one of E2B's step types.
        args: as E2B gives them: COPY source, destination, owner, mode; ENV names and values in turn;
            RUN the command; WORKDIR the directory; USER the user.
        line: where in the Dockerfile, from 1.
        text: what stands there, for people.
        bundle: the files of a COPY from the build context.
        origin: where a COPY takes its files from, when it is not the context.
        extra: what E2B has no word for; see `request.py`.
    """

    type: StepType
    args: tuple[str, ...]
    line: int
    text: str
    bundle: Bundle | None = None
    origin: Origin | None = None
    extra: tuple[str, ...] = ()


def step(
    type: StepType,
    args: tuple[str, ...],
    line: int,
    text: str,
    *,
    bundle: Bundle | None = None,
    origin: Origin | None = None,
    extra: tuple[str, ...] = (),
) -> Step:
    """A step whose arguments are known whole: what looks like a variable in them is none."""
    if type != "RUN" and any("$" in arg for arg in args):
        extra = (*extra, "verbatim")
    return Step(type, args, line, text, bundle, origin, extra)


@dataclass(frozen=True)
class Stage:
    """A build of its own: a base and the steps on it, its start command and what tells that that is ready."""

    index: int
    name: str | None
    line: int
    base: Image | Template
    steps: tuple[Step, ...]
    start: str | None = None
    ready: str | None = None

    @property
    def title(self) -> str:
        """How people call it."""
        return self.name or f"stage {self.index}"

    @property
    def needs(self) -> tuple[int, ...]:
        """The stages whose files it copies."""
        found = {step.origin.index for step in self.steps if isinstance(step.origin, StageOutput)}
        return tuple(sorted(found))


@dataclass(frozen=True)
class Note:
    """Something that was left out or read in a way worth telling; it stops nothing."""

    line: int
    message: str


@dataclass(frozen=True)
class Plan:
    """Stages in the order in which they are built; the last one is what was asked for."""

    stages: tuple[Stage, ...]
    notes: tuple[Note, ...] = field(default=())

    @property
    def target(self) -> Stage:
        """The stage that was asked for."""
        return self.stages[-1]
