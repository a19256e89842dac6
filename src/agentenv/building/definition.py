"""What a template is to be made of: a base, steps, a start command. Checked here, before anything is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentenv.errors import InvalidRequest
from agentenv.image.config import SYSTEMD_PROGRAMS
from agentenv.image.credentials import AwsKeys, Credentials
from agentenv.snapshot.records import Init, Start

STEPS_MAX = 1000
BASE = "base"
FINALIZE = "finalize"

_HASH = re.compile(r"[0-9a-f]{64}")
_MODE = re.compile(r"[0-7]{3,4}")
_VARIABLE = re.compile(r"[^=\0]+")

# E2B's images that are templates here: the base that its clients take when none is named, and its other one.
TEMPLATES_FOR_IMAGES = {"e2bdev/base": "base", "e2bdev/code-interpreter": "code-interpreter-v1"}
# What a FROM of a Dockerfile says of a template: E2B's own clients send it as an image.
TEMPLATE_SCHEME = "template://"


@dataclass(frozen=True)
class Step:
    """One instruction. With `force` it is carried out although its outcome is known. What follows `files` is
    more than E2B's API has.

    Attributes:
        files: names the uploaded files of a COPY.
        source: where else a COPY takes from: a template (id or name, with a tag or not), or
            `image:REFERENCE`. Its first argument is then a path or pattern (Go's `filepath.Match`) there.
        default: a USER or WORKDIR that holds for steps where the base does not say, and not for sandboxes.
        login: whether a RUN's shell is a login shell; else it is `/bin/sh -c`.
        verbatim: its arguments hold no variables.
        archive_owners: the files of a COPY belong to whom the archive says.
    """

    type: str
    args: tuple[str, ...]
    files: str | None = None
    force: bool = False
    source: str | None = None
    default: bool = False
    login: bool = True
    verbatim: bool = False
    archive_owners: bool = False

    @property
    def identity(self) -> list[object]:
        """All that its outcome depends on, besides what was there before and where it copies from."""
        marks = [self.default, self.login, self.verbatim, self.archive_owners]
        return [self.type, self.args, self.files or "", marks]

    def __str__(self) -> str:
        origin = f" --from={self.source}" if self.source else ""
        return f"{self.type}{origin} {' '.join(self.args)}"


@dataclass(frozen=True)
class Definition:
    """A build's definition. Of `image` and `template` one is given. With `force` nothing that is known is
    used. Without `init` the base says what is process 1 of sandboxes. `credentials` are for this build's
    pull alone, and are in no record, key or log."""

    image: str | None = None
    template: str | None = None
    steps: tuple[Step, ...] = ()
    start: Start = field(default_factory=Start)
    force: bool = False
    init: Init | None = None
    credentials: Credentials | AwsKeys | None = field(default=None, repr=False)

    @property
    def base(self) -> str:
        """The base, as it is told."""
        return self.image or f"template {self.template}"


def define(
    *,
    image: str | None = None,
    template: str | None = None,
    steps: Sequence[Step] = (),
    start: Start | None = None,
    force: bool = False,
    init: Init | None = None,
    credentials: Credentials | AwsKeys | None = None,
) -> Definition:
    """A definition, checked as far as it can be without making anything.

    Raises:
        InvalidRequest: it cannot be built; says which step is to blame.
    """
    if image and template:
        raise InvalidRequest("fromImage and fromTemplate are both given", remedy="give one of them")
    if len(steps) > STEPS_MAX:
        raise InvalidRequest(f"{len(steps)} steps are too many", remedy=f"at most {STEPS_MAX}")
    for number, step in enumerate(steps, 1):
        if (check := _CHECKS.get(step.type)) is None:
            raise InvalidRequest(
                f"step {number}: {step.type!r} is no instruction", remedy=f"one of {', '.join(_CHECKS)}"
            )
        try:
            check(step)
        except ValueError as error:
            raise InvalidRequest(f"step {number}: {step.type} {error}") from None
    image = image or (None if template else next(iter(TEMPLATES_FOR_IMAGES)))
    if image is not None and (known := _template_named_by(image)) is not None:
        image, template = None, known
    start = start or Start()
    if start.command in SYSTEMD_PROGRAMS:  # as images that have it end: it can be started as process 1 alone
        start, init = Start("", start.ready, start.settings), init or "systemd"
    return Definition(image, template, tuple(steps), start, force, init, credentials)


def _template_named_by(image: str) -> str | None:
    if image.startswith(TEMPLATE_SCHEME):
        return image.removeprefix(TEMPLATE_SCHEME)
    # As in the table: without Docker Hub's name and the tag that it has anyway.
    return TEMPLATES_FOR_IMAGES.get(image.removeprefix("docker.io/").removesuffix(":latest"))


def _check_run(step: Step) -> None:
    if not 1 <= len(step.args) <= 2 or not step.args[0].strip():
        raise ValueError("takes a command and perhaps a user")


def _check_copy(step: Step) -> None:
    if not 2 <= len(step.args) <= 4:
        raise ValueError("takes a source, a destination, and perhaps an owner and a mode")
    if not step.args[1]:
        raise ValueError("has no destination")
    if len(step.args) > 3 and step.args[3] and not _MODE.fullmatch(step.args[3]):
        raise ValueError(f"has the mode {step.args[3]!r}, which is not an octal number")
    if step.source is None and not _HASH.fullmatch(step.files or ""):
        raise ValueError("has no filesHash of 64 hexadecimal digits")


def _check_variables(step: Step) -> None:
    if not step.args or len(step.args) % 2:
        raise ValueError("takes names and values")
    for name, value in zip(step.args[::2], step.args[1::2], strict=True):
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ValueError(f"has {name!r}, which cannot be a variable")


def _check_one(step: Step) -> None:
    if not 1 <= len(step.args) <= 2 or not step.args[0]:
        raise ValueError("takes one argument")


def _check_nothing(step: Step) -> None:
    """What only describes an image says nothing that could be wrong."""


_CHECKS: dict[str, Callable[[Step], None]] = {
    "RUN": _check_run,
    "COPY": _check_copy,
    "ENV": _check_variables,
    "ARG": _check_variables,
    "WORKDIR": _check_one,
    "USER": _check_one,
    "EXPOSE": _check_nothing,
    "VOLUME": _check_nothing,
    "LABEL": _check_nothing,
}
