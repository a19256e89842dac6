"""A Dockerfile as a plan: everything that can be wrong with it is found here, before anything is made."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentenv.dockerfile import copying, shell
from agentenv.dockerfile.context import Context
from agentenv.dockerfile.plan import Image, Note, Plan, Stage, Step, Template, step
from agentenv.dockerfile.scope import PROXY_ARGS, Arguments, Scope
from agentenv.dockerfile.stages import RawStage, chosen, declare, in_order, origin_of, split
from agentenv.dockerfile.syntax import Document, FlagKind, Instruction, flags_of, parse

# What has no counterpart in a template, and why that is no loss.
_LEFT_OUT: Mapping[str, str] = {
    "EXPOSE": "every port of a sandbox can be reached",
    "LABEL": "templates have no labels",
    "MAINTAINER": "templates have no labels",
    "STOPSIGNAL": "sandboxes are paused or killed as a whole",
    "VOLUME": "all of a sandbox's disk is kept",
}
_HEALTH_FLAGS: dict[str, FlagKind] = dict.fromkeys(
    ("interval", "timeout", "start-period", "start-interval", "retries"), "text"
)
_RUN_FLAGS: dict[str, FlagKind] = {"mount": "list", "network": "text", "security": "text", "device": "list"}

# Images that nodes have as templates; they say nothing of a user, but sandboxes of them have one.
E2B_IMAGES = ("e2bdev/base", "e2bdev/code-interpreter")
E2B_USER = "user"


@dataclass
class _State:
    """What holds at one place in a stage; a stage on another one goes on from its end."""

    scope: Scope
    base: Image | Template
    steps: list[Step] = field(default_factory=list)
    shell: tuple[str, ...] = shell.DEFAULT_SHELL
    workdir: str | None = None  # None: the base image's, not known here
    entrypoint: tuple[Instruction, Sequence[str]] | None = None
    cmd: tuple[Instruction, Sequence[str]] | None = None
    ready: str | None = None
    says_user: bool = False
    says_workdir: bool = False
    own_cmd: bool = False  # whether this very stage has a CMD

    @property
    def of_e2b(self) -> bool:
        """Whether it stands on E2B's image, in which Dockerfiles build as root and sandboxes have a user."""
        return isinstance(self.base, Image) and _plain(self.base.reference) in E2B_IMAGES

    def child(self) -> _State:
        """The state of a stage that begins here."""
        return _State(
            self.scope.copy(),
            self.base,
            list(self.steps),
            self.shell,
            self.workdir,
            self.entrypoint,
            self.cmd,
            self.ready,
            self.says_user,
            self.says_workdir,
        )


def plan(
    text: str,
    context: Context,
    *,
    arguments: Mapping[str, str] | None = None,
    target: str | None = None,
) -> Plan:
    """What building `text` in `context` comes to.

    Args:
        text: the Dockerfile.
        context: where COPY and ADD take their files.
        arguments: values for ARGs (--build-arg).
        target: the stage that is wanted, by name or number; the last one if None.

    Raises:
        DockerfileError: something in it is wrong or not supported; with the line.
        NotFound: there is no stage `target`.
    """
    return _Conversion(parse(text), context, Arguments(dict(arguments or {}))).plan(target)


class _Conversion:
    def __init__(self, document: Document, context: Context, arguments: Arguments) -> None:
        self._document, self._context, self._arguments = document, context, arguments
        self._escape = document.escape
        self._notes: dict[Note, None] = {}  # a set that keeps its order
        self._outer, self._stages = split(document, arguments)
        self._done: dict[int, _State] = {}

    def plan(self, target: str | None) -> Plan:
        last = chosen(self._stages, target).index
        stages: dict[int, Stage] = {}
        wanted = [last]
        while wanted:
            index = wanted.pop()
            if index not in stages:
                stages[index] = self._stage(index)
                wanted.extend(stages[index].needs)
        for line, message in self._document.warnings:
            self._notes[Note(line, message)] = None
        for name in self._arguments.unused:
            self._notes[Note(0, f"--build-arg {name}: no ARG asks for it")] = None
        order = in_order({index: stage.needs for index, stage in stages.items()}, last)
        notes = sorted(self._notes, key=lambda note: note.line)
        return Plan(tuple(stages[index] for index in order), tuple(notes))

    def _stage(self, index: int) -> Stage:
        raw, state = self._stages[index], self._state(index)
        start = shell.start_text(state.entrypoint, state.cmd)
        if start is not None and shell.waits_for_a_terminal(start):
            source = state.entrypoint or state.cmd
            assert source is not None
            self._note(source[0], f"{start} waits for a terminal: it is not started with the sandbox")
            start = None
        # What tells when something is healthy has nothing to tell where nothing is started.
        ready = state.ready if start is not None else None
        steps = (*state.steps, *self._end(raw, state))
        return Stage(raw.index, raw.name, raw.head.line, state.base, steps, start, ready)

    def _end(self, raw: RawStage, state: _State) -> list[Step]:
        """What holds in sandboxes from E2B's image when nothing is said, as its own clients have it."""
        if not state.of_e2b:
            return []
        line, text = raw.head.line, raw.head.text
        user = [] if state.says_user else [Step("USER", (E2B_USER,), line, text)]
        workdir = [] if state.says_workdir else [Step("WORKDIR", (f"/home/{E2B_USER}",), line, text)]
        return [*user, *workdir]

    def _state(self, index: int) -> _State:
        """The state at the end of a stage; worked out once."""
        if index not in self._done:
            raw = self._stages[index]
            state = self._beginning(raw)
            for instruction in raw.body:
                self._carry_out(instruction, state, raw.index)
            self._done[index] = state
        return self._done[index]

    def _beginning(self, raw: RawStage) -> _State:
        if isinstance(raw.base, int):
            return self._state(raw.base).child()
        state = _State(Scope(), raw.base)
        # Docker's beginning, where E2B's builds begin as `user` in its home; a base that says more keeps it.
        line, text = raw.head.line, raw.head.text
        extra = () if state.of_e2b else ("default",)
        state.steps.append(Step("USER", ("root",), line, text, extra=extra))
        state.steps.append(Step("WORKDIR", ("/",), line, text, extra=extra))
        for name in PROXY_ARGS:
            value = self._arguments.take(name)
            if value is not None:
                state.scope.args[name] = value
        return state

    def _carry_out(self, instruction: Instruction, state: _State, index: int) -> None:
        name = instruction.name
        if name in _LEFT_OUT:
            self._note(instruction, f"{name} is left out: {_LEFT_OUT[name]}")
        elif name in ("COPY", "ADD"):
            self._copy(instruction, state, index)
        elif name in _ACTIONS:
            _ACTIONS[name](self, instruction, state)
        else:
            raise instruction.fault("is not supported", remedy=_REMEDIES.get(name))

    def _note(self, instruction: Instruction, message: str) -> None:
        self._notes[Note(instruction.line, message)] = None

    def _run(self, instruction: Instruction, state: _State) -> None:
        self._check_run_flags(instruction)
        variables = state.scope.build_only()
        text = shell.run_text(instruction, state.shell, variables)
        state.steps.append(Step("RUN", (text,), instruction.line, instruction.text, extra=("login",)))

    def _check_run_flags(self, instruction: Instruction) -> None:
        flags = flags_of(instruction, _RUN_FLAGS)
        for mount in flags.values.get("mount", ()):
            kind = dict(part.partition("=")[::2] for part in mount.split(",")).get("type", "bind")
            if kind not in ("cache", "tmpfs"):
                raise instruction.fault(
                    f"--mount of type {kind} is not supported", remedy="COPY what it needs"
                )
            self._note(
                instruction, f"--mount of type {kind} is left out: what is written there stays in the image"
            )
        if flags.text("network") not in (None, "default", "host"):
            raise instruction.fault(f"--network={flags.text('network')} is not supported")
        if "device" in flags:
            raise instruction.fault("--device is not supported")

    def _copy(self, instruction: Instruction, state: _State, index: int) -> None:
        found = copying.read(
            instruction,
            lambda word: state.scope.expand(instruction, word, self._escape),
            lambda text: state.scope.expand_text(instruction, text, self._escape),
        )
        if found.origin is not None:
            origin = origin_of(instruction, found.origin, index, self._stages)
            state.steps.extend(copying.from_origin(found, origin))
            return
        skipped = len(self._context.skipped)
        state.steps.append(copying.from_context(found, self._context))
        for path in self._context.skipped[skipped:]:
            self._note(instruction, f"{path} is left out: neither file, directory nor link")

    def _env(self, instruction: Instruction, state: _State) -> None:
        flags_of(instruction, {})
        if not instruction.words:
            raise instruction.fault("needs a name and a value")
        before = state.scope.copy()  # all values of one ENV see what held before it
        plain: list[str] = []
        open_ended: list[str] = []
        for name, value in zip(instruction.words[::3], instruction.words[1::3], strict=True):
            key = before.expand(instruction, name, self._escape)
            if not key:
                raise instruction.fault("a name is empty")
            text, whole = before.expand_value(instruction, value, self._escape)
            state.scope.env[key] = text if whole else None
            (plain if whole else open_ended).extend((key, text))
        if open_ended:  # first, since they see what held before the instruction
            state.steps.append(Step("ENV", tuple(open_ended), instruction.line, instruction.text))
        if plain:
            state.steps.append(step("ENV", tuple(plain), instruction.line, instruction.text))

    def _arg(self, instruction: Instruction, state: _State) -> None:
        declare(instruction, state.scope, self._arguments, self._escape, self._outer)

    def _workdir(self, instruction: Instruction, state: _State) -> None:
        path = self._single(instruction, state)
        if state.workdir is not None or path.startswith("/"):
            path = posixpath.normpath(posixpath.join(state.workdir or "/", path)).replace("//", "/")
            state.workdir = path
        state.steps.append(step("WORKDIR", (path,), instruction.line, instruction.text))
        state.says_workdir = True

    def _user(self, instruction: Instruction, state: _State) -> None:
        user = self._single(instruction, state)
        state.steps.append(step("USER", (user,), instruction.line, instruction.text))
        state.says_user = True

    def _single(self, instruction: Instruction, state: _State) -> str:
        flags_of(instruction, {})
        value = (
            state.scope.expand(instruction, instruction.words[0], self._escape) if instruction.words else ""
        )
        if not value:
            raise instruction.fault("needs a value")
        return value

    def _shell(self, instruction: Instruction, state: _State) -> None:
        if not instruction.json or not instruction.words:
            raise instruction.fault("is a JSON array", remedy='such as SHELL ["/bin/bash", "-c"]')
        state.shell = instruction.words

    def _entrypoint(self, instruction: Instruction, state: _State) -> None:
        flags_of(instruction, {})
        state.entrypoint = (instruction, state.shell)
        if not state.own_cmd:  # one of the stage below was for what that one starts
            state.cmd = None

    def _cmd(self, instruction: Instruction, state: _State) -> None:
        flags_of(instruction, {})
        state.cmd, state.own_cmd = (instruction, state.shell), True

    def _healthcheck(self, instruction: Instruction, state: _State) -> None:
        """What Docker asks again and again while a container runs is asked until the template is ready."""
        flags = flags_of(instruction, _HEALTH_FLAGS)
        kind, *words = instruction.words or ("",)
        if kind.upper() == "NONE" and not words:
            state.ready = None
        elif kind.upper() == "CMD" and words:
            state.ready = shlex.join(words) if instruction.json else shell.through(state.shell, words[0])
            if flags.values:
                self._note(
                    instruction, "HEALTHCHECK is the ready command; its times and retries are left out"
                )
        else:
            raise instruction.fault("is `HEALTHCHECK CMD command` or `HEALTHCHECK NONE`")


def _plain(reference: str) -> str:
    """An image's name without Docker Hub's and the tag that it has anyway."""
    return reference.removeprefix("docker.io/").removesuffix(":latest")


_Action = Callable[[_Conversion, Instruction, _State], None]
_ACTIONS: Mapping[str, _Action] = {
    "RUN": _Conversion._run,
    "ENV": _Conversion._env,
    "ARG": _Conversion._arg,
    "WORKDIR": _Conversion._workdir,
    "USER": _Conversion._user,
    "SHELL": _Conversion._shell,
    "ENTRYPOINT": _Conversion._entrypoint,
    "CMD": _Conversion._cmd,
    "HEALTHCHECK": _Conversion._healthcheck,
}
_REMEDIES: Mapping[str, str] = {"ONBUILD": "move it to the Dockerfiles that build on this one"}
