"""Bodies of E2B's build API (its OpenAPI file, version 3 of the build and 2 of its start)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from agentenv.api.models import Asked, Given


class BuildBody(Asked):
    """A build that is wanted. `alias` is what older clients call the name."""

    name: str | None = Field(default=None, min_length=1, max_length=400)
    alias: str | None = Field(default=None, min_length=1, max_length=400)
    tags: list[str] | None = None
    cpuCount: int | None = None
    memoryMB: int | None = None
    minFreeDiskMb: int | None = None


class StepBody(Asked):
    """An instruction. Additions to E2B's: `from` has a COPY take from another template (its id or name, with
    a tag or not) or from an image (`image:REFERENCE`); `default` is a USER or WORKDIR that holds where the
    base does not say, and not for sandboxes; `login: false` runs a RUN with `/bin/sh -c`; `verbatim` takes
    arguments as they are; `owners: "archive"` keeps the owners of copied files."""

    type: str = Field(max_length=32)
    args: list[str] | None = None
    filesHash: str | None = None
    force: bool | None = None
    source: str | None = Field(default=None, alias="from", max_length=1024)
    default: bool | None = None
    login: bool | None = None
    verbatim: bool | None = None
    owners: Literal["archive"] | None = None


class RegistryBody(Asked):
    """Credentials for one pull."""

    type: Literal["registry", "aws", "gcp"]
    username: str | None = None
    password: str | None = Field(default=None, repr=False)
    serviceAccountJson: str | None = Field(default=None, repr=False)
    awsAccessKeyId: str | None = None
    awsSecretAccessKey: str | None = Field(default=None, repr=False)
    awsRegion: str | None = Field(default=None, pattern=r"^[a-z0-9-]{1,40}$")


class StartBody(Asked):
    """What a build is made of. An addition to E2B's: `init` says what is process 1 of sandboxes, where that
    is not to be as the image or template says."""

    fromImage: str | None = Field(default=None, max_length=1024)
    fromTemplate: str | None = Field(default=None, max_length=1024)
    fromImageRegistry: RegistryBody | None = Field(default=None, repr=False)
    startCmd: str | None = None
    readyCmd: str | None = None
    init: Literal["agent", "systemd"] | None = None
    force: bool | None = None
    steps: list[StepBody] | None = None


class PublicBody(Asked):
    public: bool | None = None


class AssignBody(Asked):
    target: str = Field(min_length=1, max_length=600)
    tags: list[str] = Field(min_length=1, max_length=100)


class RemoveBody(Asked):
    name: str = Field(min_length=1, max_length=600)
    tags: list[str] = Field(min_length=1, max_length=100)


class BuildAnswer(Given):
    """A build that was opened."""

    templateID: str
    buildID: str
    public: bool
    names: list[str]
    tags: list[str]
    aliases: list[str]


class UploadAnswer(Given):
    """Whether files are here, and where they are put with a PUT."""

    present: bool
    url: str


class LogAnswer(Given):
    """One thing that a build told; `step` is `base`, `finalize`, or a step's number from 1 on."""

    timestamp: str
    message: str
    level: str
    step: str | None = None


class ReasonAnswer(Given):
    message: str
    step: str | None = None


class StatusAnswer(Given):
    """A build, and some of what it told."""

    templateID: str
    buildID: str
    status: Literal["waiting", "building", "ready", "error"]
    logs: list[str] = Field(default_factory=list)
    logEntries: list[LogAnswer]
    reason: ReasonAnswer | None = None


class LogsAnswer(Given):
    logs: list[LogAnswer]


class ConfigAnswer(Given):
    """How what a build made is run. Entry point, command, ports and labels are what the image below says, and
    are kept for whoever exports it; what runs in sandboxes is the start command, and `init` as process 1."""

    user: str
    workdir: str
    env: dict[str, str]
    entrypoint: list[str]
    cmd: list[str]
    exposedPorts: list[str]
    labels: dict[str, str]
    init: Literal["agent", "systemd"]
    startCmd: str | None = None
    readyCmd: str | None = None


class ListedBuild(Given):
    """A build in a template's detail; `config` is more than E2B shows."""

    buildID: str
    status: Literal["waiting", "building", "ready", "error"]
    createdAt: str
    updatedAt: str
    finishedAt: str | None = None
    cpuCount: int
    memoryMB: int
    diskSizeMB: int | None = None
    envdVersion: str | None = None
    config: ConfigAnswer | None = None
    tags: list[str] = Field(default_factory=list)


class TagsAnswer(Given):
    tags: list[str]
    buildID: str


class TagAnswer(Given):
    tag: str
    buildID: str
    createdAt: str


class NamesAnswer(Given):
    names: list[str]


def definition_steps(body: StartBody) -> list[dict[str, Any]]:
    """The steps' fields, as `Step` has them."""
    return [
        {
            "type": step.type.upper(),
            "args": tuple(step.args or ()),
            "files": step.filesHash,
            "source": step.source or None,
            "force": bool(step.force),
            "default": bool(step.default),
            "login": step.login is not False,
            "verbatim": bool(step.verbatim),
            "archive_owners": step.owners == "archive",
        }
        for step in body.steps or []
    ]
