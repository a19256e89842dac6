"""What a definition comes to, step by step: in which context each is carried out, and the key of what is
there afterwards. Pure: a build whose last key is known needs no machine.

A key is the digest of all that led there: what the base is and how large the machine, then each step. So an
unchanged beginning has the keys that it had, in whichever template or build.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentenv.building.definition import Definition, Step
from agentenv.building.expansion import expand
from agentenv.image.config import ImageConfig
from agentenv.snapshot.records import GuestSettings, Init, Resources, Start

# Part of every key: raise it when the same steps lead to something else than before.
FORMAT = 1

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# These change the machine and are kept; the others are carried out again before the next of these.
KEPT = frozenset({"RUN", "COPY"})
# These change the machine as well, unless they are but what holds by default.
_ACTIVE = KEPT | {"WORKDIR", "USER"}


@dataclass(frozen=True)
class Context:
    """What holds at a point of a definition. An empty directory means the user's home.

    Attributes:
        user, workdir, env: as sandboxes get them in the end.
        args: variables for the steps alone.
        acting, place: user and directory of steps where they are not those of sandboxes.
    """

    user: str
    workdir: str
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    acting: str | None = None
    place: str | None = None

    @property
    def actor(self) -> str:
        """As whom steps are carried out."""
        return self.user if self.acting is None else self.acting

    @property
    def directory(self) -> str:
        """Where."""
        return self.workdir if self.place is None else self.place

    @property
    def starting(self) -> GuestSettings:
        """What the start command runs with."""
        return GuestSettings(dict(self.env), self.actor, self.directory or None)

    @property
    def variables(self) -> dict[str, str]:
        """The variables of a step's command."""
        return {**self.args, **self.env}

    @property
    def settings(self) -> GuestSettings:
        """What sandboxes get of it."""
        return GuestSettings(dict(self.env), self.user, self.workdir or None)

    def expand(self, text: str) -> str:
        """The text with its variables' values."""
        return expand(text, {"PATH": PATH, "HOME": "/root", **self.variables})


@dataclass(frozen=True)
class Root:
    """What a build begins with.

    Attributes:
        identity: names the content.
        start: what a template below runs.
        says_user, says_workdir: whether the base says as whom and where commands run.
        login_path: the PATH that its login shells keep already.
        init: what its machines have as process 1.
        config: what the image below says of how it is run.
    """

    identity: str
    resources: Resources
    context: Context
    start: Start = field(default_factory=Start)
    says_user: bool = True
    says_workdir: bool = True
    login_path: str | None = None
    init: Init = "agent"
    config: ImageConfig = field(default_factory=ImageConfig)

    @property
    def key(self) -> str:
        """The key of a machine that has just booted from it."""
        resources = self.resources
        return _key(
            "root",
            str(FORMAT),
            self.identity,
            *(str(size) for size in (resources.vcpus, resources.memory_mib, resources.disk_mib)),
            json.dumps([self.context.user, self.context.workdir, sorted(self.context.env.items())]),
        )


@dataclass(frozen=True)
class Planned:
    """A step in its place: its number from 1 on, with its variables' values put in, the context that it is
    carried out in, the one after it, and the key of what is there then."""

    number: int
    step: Step
    before: Context
    after: Context
    key: str

    @property
    def kept(self) -> bool:
        """Whether what is there afterwards is kept."""
        return self.step.type in KEPT

    @property
    def active(self) -> bool:
        """Whether there is something to do in the machine."""
        return self.step.type in _ACTIVE and not self.step.default


@dataclass(frozen=True)
class Plan:
    """All of a build. `key` is that of the whole, `forced` that of the first step (0: the base) from which on
    nothing that is known may be used; None where all may. `init` is of sandboxes: steps are carried out with
    the agent as process 1."""

    root: Root
    steps: tuple[Planned, ...]
    start: Start
    key: str
    forced: int | None
    init: Init = "agent"

    @property
    def settings(self) -> GuestSettings:
        """What sandboxes get."""
        return replace(self.context.settings, init=self.init)

    @property
    def context(self) -> Context:
        """What holds in the end."""
        return self.steps[-1].after if self.steps else self.root.context

    @property
    def login_path(self) -> str | None:
        """The PATH that login shells are to be told to keep, if any."""
        path = self.context.env.get("PATH")
        return None if path in (PATH, self.root.login_path) else path

    def usable(self) -> tuple[Planned, ...]:
        """The steps whose outcome may be known, the last one first."""
        known = [
            each for each in self.steps if each.kept and (self.forced is None or each.number < self.forced)
        ]
        return tuple(reversed(known))

    def rest(self, done: int) -> tuple[Planned, ...]:
        """What is left to do after step `done` (0: the base)."""
        return tuple(each for each in self.steps if each.number > done and each.active)


def plan(definition: Definition, root: Root, copied: Sequence[str] = ()) -> Plan:
    """What a definition comes to on a base.

    Args:
        definition: the definition.
        root: its base.
        copied: for each step that copies from somewhere else, in their order, the identity of that.
    """
    context, key = root.context, root.key
    origins = iter(copied)
    steps: list[Planned] = []
    for number, given in enumerate(definition.steps, 1):
        step = _expanded(given, context)
        following = _after(step, context, root)
        origin = next(origins) if step.source else ""
        key = _key(key, json.dumps(step.identity), origin)
        steps.append(Planned(number, step, context, following, key))
        context = following
    start = root.start
    if definition.start:
        start = replace(definition.start, settings=context.starting)
    init = definition.init or root.init
    key = _key(key, "start", start.command, start.ready, *([init] if init != "agent" else []))
    return Plan(root, tuple(steps), start, key, _forced(definition), init)


def _forced(definition: Definition) -> int | None:
    if definition.force:
        return 0
    return next((number for number, step in enumerate(definition.steps, 1) if step.force), None)


def _expanded(step: Step, context: Context) -> Step:
    """A step with its variables' values; a command's are the shell's matter."""
    if step.type == "RUN" or step.verbatim:
        return step
    if step.type in ("ENV", "ARG"):
        args = [context.expand(arg) if index % 2 else arg for index, arg in enumerate(step.args)]
    else:
        args = [context.expand(arg) for arg in step.args]
    return replace(step, args=tuple(args))


def _after(step: Step, context: Context, root: Root) -> Context:
    if step.type in ("ENV", "ARG"):
        given = dict(zip(step.args[::2], step.args[1::2], strict=True))
        if step.type == "ENV":
            return replace(context, env={**context.env, **given})
        return replace(context, args={**context.args, **given})
    if step.default:
        return _with_default(step, context, root)
    if step.type == "WORKDIR":
        path = posixpath.join("/", context.directory, step.args[0])
        return replace(context, workdir=posixpath.normpath(path), place=None)
    if step.type == "USER":
        return replace(context, user=step.args[0].partition(":")[0], acting=None)
    return context


def _with_default(step: Step, context: Context, root: Root) -> Context:
    if step.type == "USER" and not root.says_user:
        return replace(context, acting=step.args[0])
    if step.type == "WORKDIR" and not root.says_workdir:
        return replace(context, place=step.args[0])
    return context


def _key(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
