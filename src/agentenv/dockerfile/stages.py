"""The stages of a Dockerfile: which there are, which one is meant, and what it needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentenv.dockerfile.plan import Image, Origin, StageOutput, Template
from agentenv.dockerfile.scope import PLATFORM, PLATFORM_ARGS, Arguments, Scope
from agentenv.dockerfile.syntax import DockerfileError, Document, Instruction, flags_of
from agentenv.errors import NotFound

TEMPLATE_SCHEME = "template://"
_NAME = re.compile(r"[a-z][a-z0-9._-]*")


@dataclass(frozen=True)
class RawStage:
    """A FROM and the instructions up to the next. `base` is an index where it is an earlier stage."""

    index: int
    name: str | None
    head: Instruction
    base: int | Image | Template
    body: tuple[Instruction, ...]


def split(document: Document, arguments: Arguments) -> tuple[Scope, list[RawStage]]:
    """The ARGs before the first FROM, and the stages.

    Raises:
        DockerfileError: there is no FROM, something else than ARG before it, or a FROM that cannot be.
    """
    scope = Scope(args=dict(PLATFORM_ARGS), closed=True)
    stages: list[RawStage] = []
    blocks: list[list[Instruction]] = []
    for instruction in document.instructions:
        if instruction.name == "FROM":
            blocks.append([instruction])
        elif blocks:
            blocks[-1].append(instruction)
        elif instruction.name == "ARG":
            declare(instruction, scope, arguments, document.escape)
        else:
            raise instruction.fault("stands before the first FROM", remedy="only ARG may")
    if not blocks:
        raise DockerfileError(0, "there is no FROM", remedy="begin with `FROM IMAGE`")
    for index, (head, *body) in enumerate(blocks):
        stages.append(_stage(index, head, tuple(body), scope, stages, document.escape))
    return scope, stages


def declare(
    instruction: Instruction, scope: Scope, arguments: Arguments, escape: str, outer: Scope | None = None
) -> None:
    """Carry out an ARG. `outer` has the ARGs before the first FROM, for one in a stage.

    Raises:
        DockerfileError: it has no name, or an invalid value.
    """
    flags_of(instruction, {})
    if not instruction.words:
        raise instruction.fault("needs a name")
    for word in instruction.words:
        name, equals, default = word.partition("=")
        name = scope.expand(instruction, name, escape)
        if not name:
            raise instruction.fault("needs a name")
        value = arguments.take(name)
        if value is None and equals:
            value = scope.expand(instruction, default, escape)
        if value is None and outer is not None:
            value = outer.args.get(name)
        scope.args[name] = value


def _stage(
    index: int,
    head: Instruction,
    body: tuple[Instruction, ...],
    scope: Scope,
    earlier: Sequence[RawStage],
    escape: str,
) -> RawStage:
    platform = flags_of(head, {"platform": "text"}).text("platform")
    if platform is not None and scope.expand(head, platform, escape) not in (
        PLATFORM,
        f"{PLATFORM}/v1",
        "amd64",
    ):
        raise head.fault(f"--platform={platform}: nodes run {PLATFORM}")
    words = head.words
    if len(words) not in (1, 3) or (len(words) == 3 and words[1].lower() != "as"):
        raise head.fault("is `FROM IMAGE` or `FROM IMAGE AS NAME`")
    name = words[2].lower() if len(words) == 3 else None
    if name is not None and not _NAME.fullmatch(name):
        raise head.fault(f"{words[2]!r} is not a name for a stage", remedy="letters, digits, dots, dashes")
    return RawStage(index, name, head, _base(head, scope.expand(head, words[0], escape), earlier), body)


def _base(head: Instruction, reference: str, earlier: Sequence[RawStage]) -> int | Image | Template:
    if not reference:
        raise head.fault(f"{head.words[0]} comes to nothing", remedy="give its ARG a value, or --build-arg")
    if (known := _named(reference, earlier)) is not None:
        return known
    if reference == "scratch":
        raise head.fault("scratch, the empty image, is no base of a template", remedy="such as FROM busybox")
    return _outside(head, reference)


def _outside(instruction: Instruction, reference: str) -> Image | Template:
    if reference.startswith(TEMPLATE_SCHEME):
        return Template(reference.removeprefix(TEMPLATE_SCHEME))
    if re.search(r"\s", reference):
        raise instruction.fault(f"{reference!r} is not the reference of an image")
    return Image(reference)


def _named(name: str, stages: Sequence[RawStage]) -> int | None:
    """The last stage of that name, since a name may be taken again."""
    return next((stage.index for stage in reversed(stages) if stage.name == name.lower()), None)


def origin_of(instruction: Instruction, name: str, stage: int, stages: Sequence[RawStage]) -> Origin:
    """What `--from=NAME` in the stage of that index means: an earlier stage by name or number, or an image.

    Raises:
        DockerfileError: it is the stage itself, a later one, or no reference.
    """
    if "$" in name:
        raise instruction.fault(
            "--from takes no variables", remedy="write `FROM ${VARIABLE} AS NAME` and --from=NAME"
        )
    if not name:
        raise instruction.fault("--from needs a value")
    earlier = stages[:stage]
    if (known := _named(name, earlier)) is not None:
        return StageOutput(known)
    if name.isdecimal():
        if int(name) >= stage:
            raise instruction.fault(f"--from={name}: there is no such stage before this one")
        return StageOutput(int(name))
    if name == "scratch":
        raise instruction.fault("there is nothing in scratch")
    if _named(name, stages) is not None:
        raise instruction.fault(f"--from={name}: that stage comes later", remedy="move it up")
    return _outside(instruction, name)


def chosen(stages: Sequence[RawStage], target: str | None) -> RawStage:
    """The stage that --target means, the last one without.

    Raises:
        NotFound: there is none of that name or number.
    """
    if target is None:
        return stages[-1]
    known = _named(target, stages)
    if known is None and target.isdecimal() and int(target) < len(stages):
        known = int(target)
    if known is None:
        names = ", ".join(stage.name or str(stage.index) for stage in stages)
        raise NotFound(f"there is no stage {target}", remedy=f"the stages are {names}")
    return stages[known]


def in_order(stages: dict[int, tuple[int, ...]], last: int) -> list[int]:
    """The stage `last` after all that it needs, each once; `stages` has what each one needs."""
    ordered: dict[int, None] = {}

    def visit(index: int) -> None:
        if index in ordered:
            return
        for needed in stages[index]:
            visit(needed)
        ordered[index] = None

    visit(last)
    return list(ordered)
