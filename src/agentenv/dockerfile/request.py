"""A stage in the words of the build API: the body of `POST /v2/templates/{id}/builds/{build}`.

E2B's words do for most of a Dockerfile. Where they do not, a step has a field more, which only this project's
nodes read; one that does not know a field builds without it, as described:

`from` (COPY)
    Where the files come from instead of an upload: `image:REFERENCE`, or a template's id or NAME[:TAG]. The
    source is a path, or a pattern of Go's `filepath.Match`, in that file system. A node must know this one.
`default: true` (USER, WORKDIR)
    Holds only where the base does not say, and is not what sandboxes get. Without it: root and / hold.
`login: false` (RUN)
    Run by `/bin/sh -c`, not by a login shell, whose profile would set another PATH. Without it: `bash -l -c`.
`verbatim: true` (all but RUN)
    The arguments hold no variables. Without it: a dollar sign and a name are replaced.
`owners: "archive"` (COPY)
    Owners are the archive's own. Without it: root.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentenv.dockerfile.plan import Image, Origin, Stage, StageOutput, Step, Template

_EXTRA: Mapping[str, tuple[str, object]] = {
    "default": ("default", True),
    "login": ("login", False),
    "verbatim": ("verbatim", True),
    "owners": ("owners", "archive"),
}


def body(
    stage: Stage,
    hashes: Mapping[int, str],
    built: Mapping[int, str],
    *,
    start: str | None = None,
    ready: str | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """The body that starts the build of a stage.

    Args:
        stage: what to build.
        hashes: for each COPY with files, its place among the steps and the digest of the files.
        built: the templates that the stages it needs have become, by their index.
        start: a start command instead of the stage's.
        ready: a ready command instead of the stage's.
        force: build without what is cached.
    """
    base = {"fromTemplate" if isinstance(stage.base, Template) else "fromImage": stage.base.reference}
    steps = [_step(step, hashes.get(place), built, force) for place, step in enumerate(stage.steps)]
    commands = {
        "startCmd": stage.start if start is None else start,
        "readyCmd": stage.ready if ready is None else ready,
    }
    return {
        **base,
        **{key: value for key, value in commands.items() if value},
        "steps": steps,
        "force": force,
    }


def _step(step: Step, digest: str | None, built: Mapping[int, str], force: bool) -> dict[str, Any]:
    asked: dict[str, Any] = {"type": step.type, "args": list(step.args), "force": force}
    if digest is not None:
        asked["filesHash"] = digest
    if step.origin is not None:
        asked["from"] = _origin(step.origin, built)
    asked.update(_EXTRA[name] for name in step.extra)
    return asked


def _origin(origin: Origin, built: Mapping[int, str]) -> str:
    if isinstance(origin, StageOutput):
        return built[origin.index]
    return f"image:{origin.reference}" if isinstance(origin, Image) else origin.reference
