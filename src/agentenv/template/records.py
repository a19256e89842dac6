"""The records of templates and of their builds.

A template is a name with an id that stays. What sandboxes start from is one of its builds; a tag says
which. Times are seconds since the epoch, sizes MiB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agentenv.errors import StoreCorrupt
from agentenv.image.config import ImageConfig
from agentenv.snapshot.records import Init, Start
from agentenv.template.states import BuildState


@dataclass(frozen=True)
class Template:
    """What sandboxes are started from: a template as one of its builds made it.

    With `rootfs` its first snapshot is made by booting that; without, the build left the snapshot.
    `recipe` names what it was made from, so that the same request is known again; `digest` names the
    content of the root filesystem. `entrypoint`, `cmd`, `labels` and `exposed_ports` (as `80/tcp`) are what
    the image below says; of these only an entry point that is systemd has an effect here, by `init`.
    """

    id: str
    name: str
    build_id: str
    rootfs: Path | None
    disk_mib: int
    memory_mib: int
    vcpus: int
    source: str
    recipe: str
    digest: str
    size_bytes: int
    default_user: str
    default_workdir: str
    created_at: float
    updated_at: float
    env: dict[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    start: Start = field(default_factory=Start)
    labels: dict[str, str] = field(default_factory=dict)
    exposed_ports: tuple[str, ...] = ()
    init: Init = "agent"

    @property
    def image_config(self) -> ImageConfig:
        """How an image of it is run (of its user and directory what holds in sandboxes)."""
        return ImageConfig(
            self.env,
            self.default_workdir,
            self.default_user,
            self.entrypoint,
            self.cmd,
            self.exposed_ports,
            self.labels,
        )


@dataclass(frozen=True)
class Reason:
    """Why a build is not ready. `step` is `base`, `finalize`, or a step's number from 1 on."""

    message: str
    step: str | None = None


@dataclass(frozen=True)
class Build:
    """One making of a template. `vcpus` and `memory_mib` are None where the request did not say; `free_mib`
    is how much of its disk is to be free above an image; `made` is there once it is ready."""

    id: str
    template_id: str
    state: BuildState
    created_at: float
    updated_at: float
    tags: tuple[str, ...] = ()
    vcpus: int | None = None
    memory_mib: int | None = None
    free_mib: int = 0
    reason: Reason | None = None
    made: Template | None = None


@dataclass(frozen=True)
class Named:
    """A template's name, and its builds, newest first."""

    id: str
    name: str
    public: bool
    created_at: float
    builds: tuple[Build, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)  # to build ids

    @property
    def shown(self) -> Build | None:
        """The build that stands for it in lists: that of the tag `default`, else the newest ready one, else
        the newest."""
        tagged = self.tags.get("default")
        for build in self.builds:
            if build.id == tagged:
                return build
        ready = [build for build in self.builds if build.state is BuildState.READY]
        return next(iter(ready or self.builds), None)


@dataclass(frozen=True)
class Tag:
    """A tag of a template."""

    tag: str
    build_id: str
    assigned_at: float


_CODEC = TypeAdapter(Build)


def encode(build: Build) -> str:
    """The record as a JSON document."""
    return _CODEC.dump_json(build).decode()


def decode(document: str) -> Build:
    """The record of a JSON document.

    Raises:
        StoreCorrupt: it is not one.
    """
    try:
        return _CODEC.validate_json(document)
    except ValidationError as error:
        raise StoreCorrupt(
            f"a template's build cannot be read: {error}", remedy="delete the template and create it again"
        ) from None
