"""What a new sandbox can be started from: a template, an image, or a snapshot that somebody took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentenv.errors import InvalidRequest, NotFound
from agentenv.image.cache import CachedImage
from agentenv.sandbox.parts import Template, Templates
from agentenv.sandbox.records import Origin
from agentenv.sandbox.requests import Shape
from agentenv.snapshot.records import Attached, GuestSettings, Init, Resources, Snapshot, Start
from agentenv.snapshot.store import Snapshots

# How the builds of images begin that are no template's.
IMAGE = "image:"


@dataclass(frozen=True)
class ImageTemplate:
    """An image that a sandbox is made of, with the node's usual size: a template without a name."""

    id: str
    name: str
    build_id: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    rootfs: Path
    env: Mapping[str, str]
    default_user: str
    default_workdir: str | None
    start: Start = field(default_factory=Start)
    init: Init = "agent"


@dataclass(frozen=True)
class Source:
    """What is started from, and what the sandbox is to have. Without `snapshot` it is the template's first
    one, perhaps still to be made."""

    origin: Origin
    resources: Resources
    guest: GuestSettings
    template: Template | None = None
    snapshot: Snapshot | None = None
    drives: tuple[Attached, ...] = ()

    @property
    def first(self) -> Resources:
        """The size of the machine that the template's snapshot is of: a disk grows afterwards."""
        assert self.template is not None
        return replace(self.resources, disk_mib=self.template.disk_mib)


def shaped(found: Source, shape: Shape) -> Source:
    """A source for machines of another size.

    Raises:
        InvalidRequest: the disk would have to shrink.
    """
    usual = found.resources
    if shape.disk_mib is not None and shape.disk_mib < usual.disk_mib:
        raise InvalidRequest(
            f"diskSizeMB: {shape.disk_mib} is less than the {usual.disk_mib} of {found.origin.name}",
            remedy="a disk can only grow",
        )
    return replace(
        found,
        resources=Resources(
            shape.vcpus or usual.vcpus, shape.memory_mib or usual.memory_mib, shape.disk_mib or usual.disk_mib
        ),
    )


def image_template(name: str, image: CachedImage, *, vcpus: int, memory_mib: int) -> ImageTemplate:
    """An image as what a sandbox is made of; `name` is what it was called."""
    digest = image.digest.removeprefix("sha256:")
    return ImageTemplate(
        id=f"image-{digest[:16]}",
        name=name,
        # The file belongs to it: what is made of the same content again has other blocks in other places.
        build_id=f"{IMAGE}{digest}/{image.rootfs.stem}",
        vcpus=vcpus,
        memory_mib=memory_mib,
        disk_mib=image.disk_mib,
        rootfs=image.rootfs,
        env=dict(image.config.env),
        default_user=image.default_user,
        default_workdir=image.default_workdir,
        init=image.config.init,
    )


def settings_of(template: Template) -> GuestSettings:
    """What processes in a template's sandboxes start with."""
    return GuestSettings(dict(template.env), template.default_user, template.default_workdir, template.init)


def of_template(template: Template) -> Source:
    """A template as a source."""
    return Source(
        Origin(template.id, template.name, template.build_id),
        Resources(template.vcpus, template.memory_mib, template.disk_mib),
        settings_of(template),
        template=template,
    )


def of_snapshot(snapshot: Snapshot) -> Source:
    """A snapshot as a source."""
    descent = snapshot.template
    return Source(
        Origin(descent.id, descent.name, descent.build_id),
        snapshot.resources,
        snapshot.guest,
        snapshot=snapshot,
        drives=snapshot.drives,
    )


def find(reference: str, templates: Templates, snapshots: Snapshots) -> Source:
    """The source of that id or name. Names of templates and snapshots are never the same.

    Raises:
        NotFound: there is neither a template nor a checkpoint of that name.
    """
    try:
        return of_template(templates.get(reference))
    except NotFound:
        snapshot = snapshots.find(reference)
        if snapshot is None or snapshot.kind != "checkpoint":
            raise
        return of_snapshot(snapshot)
