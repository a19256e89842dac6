"""A plan carried out on a node: stage after stage, with the log on the terminal."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from agentenv.cli.api import Unreachable
from agentenv.cli.builds import Build, BuildNode, Line, Seen
from agentenv.cli.registries import Logins, field
from agentenv.dockerfile.bundle import Bundle
from agentenv.dockerfile.plan import Plan, Stage
from agentenv.dockerfile.request import body
from agentenv.errors import AenvError

if TYPE_CHECKING:
    from agentenv.snapshot.records import Init

POLL_S = 0.2  # as E2B's clients do: the interface has no way of waiting
UNREACHABLE_S = 30.0  # a node that restarts is waited for


class BuildFailed(AenvError):
    """A build that ended in an error; the message names the line of the Dockerfile."""

    code = "build_failed"


@dataclass(frozen=True)
class Wanted:
    """What a template is to be. Memory in MiB; None leaves it to the node."""

    name: str
    cpus: int | None = None
    memory_mib: int | None = None
    start: str | None = None
    ready: str | None = None
    force: bool = False
    init: Init | None = None


class Building:
    """A plan being carried out.

    Stages that others copy from are built as templates of their own, named after what they are built
    from, and deleted at the end: the steps that they were built of stay in the node's cache.
    """

    def __init__(
        self,
        node: BuildNode,
        wanted: Wanted,
        logins: Logins | None = None,
        *,
        verbose: bool = False,
        quiet: bool = False,
    ) -> None:
        self._node, self._wanted, self._verbose, self._quiet = node, wanted, verbose, quiet
        self._logins = logins or {}
        self._current: Build | None = None
        self._inner: list[str] = []

    @staticmethod
    def preview(plan: Plan, wanted: Wanted) -> list[dict[str, Any]]:
        """The bodies of the builds, with stages that copy from others naming them by their number."""
        built = {stage.index: f"stage {stage.index}" for stage in plan.stages}
        return [_body(stage, plan, _digests(stage), built, wanted) for stage in plan.stages]

    def run(self, plan: Plan, *, detach: bool = False) -> Build:
        """Carry it out and return the build of its target, which is ready unless `detach`.

        Raises:
            BuildFailed: a step did not succeed.
            AenvError: the node refused, or is not to be reached.
        """
        built: dict[int, str] = {}
        try:
            for stage in plan.stages:
                last = stage is plan.target
                build = self._begin(stage, plan, built)
                if not (last and detach):
                    self._wait(build, stage)
                built[stage.index] = build.template_id
        finally:
            if not detach:
                self._clear()
        return build

    def cancel(self) -> None:
        """End what is being built, as far as the node lets us."""
        build, self._current = self._current, None
        if build is not None and self._node.cancel(build):
            click.echo("aenv: cancelled", err=True)
        elif build is not None:
            click.echo(f"aenv: the node goes on with build {build.build_id}", err=True)
        self._clear()

    def _begin(self, stage: Stage, plan: Plan, built: dict[int, str]) -> Build:
        digests = _digests(stage)
        asked = _body(stage, plan, digests, built, self._wanted)
        last = stage is plan.target
        name = self._wanted.name if last else _inner_name(self._wanted.name, stage, asked)
        if len(plan.stages) > 1 and not self._quiet:
            click.echo(f"== {stage.title}", err=True)
        self._current = build = self._node.create(name, self._wanted.cpus, self._wanted.memory_mib)
        if not last:
            self._inner.append(build.template_id)
        for place, bundle in _bundles(stage):
            sent = self._node.upload(build, bundle, digests[place], quiet=self._quiet)
            if sent and not self._quiet:
                step = stage.steps[place]
                click.echo(f"line {step.line}: {sent / (1 << 20):.1f} MiB sent", err=True)
        self._node.start(build, {**asked, **field(self._logins, stage)})
        return build

    def _wait(self, build: Build, stage: Stage) -> None:
        log = _Log(stage, verbose=self._verbose)
        offset = 0
        while True:
            seen = self._look(build, offset)
            offset += len(seen.lines)
            if not self._quiet:
                log.show(seen.lines)
            # An answer has a limited number of lines: after the end they are read until there are no more.
            if seen.status in ("ready", "error") and not seen.lines:
                break
            if not seen.lines:
                time.sleep(POLL_S)
        self._current = None
        if seen.status == "error":
            where = log.place(seen.step)
            raise BuildFailed(f"{where}{seen.reason or 'the build failed'}")

    def _look(self, build: Build, offset: int) -> Seen:
        begun = time.monotonic()
        while True:
            try:
                return self._node.look(build, offset)
            except Unreachable:
                if time.monotonic() - begun > UNREACHABLE_S:
                    raise
                time.sleep(POLL_S)

    def _clear(self) -> None:
        for template_id in reversed(self._inner):
            error = self._node.delete(template_id)
            if error is not None:
                click.echo(f"aenv: the stage's template {template_id} is still there: {error}", err=True)
        self._inner.clear()


class _Log:
    """Prints a log, with the line of the Dockerfile above what each step says."""

    def __init__(self, stage: Stage, *, verbose: bool) -> None:
        self._stage, self._verbose = stage, verbose
        self._step: str | None = None

    def show(self, lines: tuple[Line, ...]) -> None:
        for line in lines:
            if line.level == "debug" and not self._verbose:
                continue
            if line.step is not None and line.step != self._step:
                self._step = line.step
                click.echo(click.style(self._title(line.step), bold=True), err=True)
            colour = {"error": "red", "warn": "yellow"}.get(line.level)
            click.echo(f"  {click.style(line.message.rstrip(), fg=colour)}", err=True)

    def place(self, step: str | None) -> str:
        """Where in the Dockerfile a step stands, as the beginning of a message."""
        number = self._number(step)
        return "" if number is None else f"line {self._stage.steps[number].line}: "

    def _title(self, step: str) -> str:
        number = self._number(step)
        if number is None:
            return step
        known = self._stage.steps[number]
        text = known.text if len(known.text) <= 100 else f"{known.text[:97]}..."
        return f"[{number + 1}/{len(self._stage.steps)}] line {known.line}: {text}"

    def _number(self, step: str | None) -> int | None:
        """The place among the steps, from 0; None for what is no step of the Dockerfile."""
        if step is None or not step.isdecimal() or not 1 <= int(step) <= len(self._stage.steps):
            return None
        return int(step) - 1


def _body(
    stage: Stage, plan: Plan, digests: dict[int, str], built: dict[int, str], wanted: Wanted
) -> dict[str, Any]:
    if stage is plan.target:
        asked = body(stage, digests, built, start=wanted.start, ready=wanted.ready, force=wanted.force)
        return {**asked, "init": wanted.init} if wanted.init else asked
    # Only the files of the others are wanted: nothing is started in them.
    return {**body(stage, digests, built, start="", ready="", force=wanted.force), "init": "agent"}


def _bundles(stage: Stage) -> list[tuple[int, Bundle]]:
    return [(place, step.bundle) for place, step in enumerate(stage.steps) if step.bundle is not None]


def _digests(stage: Stage) -> dict[int, str]:
    return {place: bundle.digest() for place, bundle in _bundles(stage)}


def _inner_name(name: str, stage: Stage, asked: dict[str, Any]) -> str:
    """A name that says what for, and differs where the stage does."""
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
    plain = "".join(
        each for each in name.partition(":")[0].rpartition("/")[2] if each.isalnum() or each in "-_"
    )
    return f"{plain[:64].lower()}-stage{stage.index}-{digest}"
