"""What a build begins with: an image's root filesystem, or a template."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from agentenv.building.definition import BASE, Definition
from agentenv.building.plan import Context, Root
from agentenv.building.steps import StepFailed
from agentenv.config import Settings
from agentenv.errors import AenvError, InvalidRequest
from agentenv.image import reference, source
from agentenv.image.credentials import AwsKeys, Credentials
from agentenv.image.registry.access import Access
from agentenv.progress import Progress
from agentenv.sandbox.parts import Held, Images
from agentenv.sandbox.prepare import Prepared
from agentenv.snapshot.records import Resources, Snapshot
from agentenv.snapshot.store import Snapshots
from agentenv.template.records import Build, Template
from agentenv.template.sizes import DISK_MIB_MAX, within
from agentenv.vmm.machine import Layer

# E2B's convention: who commands run as in an image that does not say.
USER = "user"
IMAGE = "image:"


class Catalogue(Protocol):
    """The templates; see template.store.Templates."""

    def get(self, reference: str) -> Template: ...


@dataclass(frozen=True)
class Ground:
    """A build's beginning. Without `snapshot` a machine is booted from `layers`, and with `account` a user of
    that name is seen to; where it `grows`, its filesystem is smaller than its disk. `origins` are what steps
    copy from, by their numbers."""

    root: Root
    layers: tuple[Layer, ...] = ()
    snapshot: Snapshot | None = None
    template: Template | None = None
    account: str | None = None
    grows: bool = False
    origins: dict[int, Ground] = field(default_factory=dict)
    _keep: tuple[Callable[[], Held], ...] = field(default=(), repr=False)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the files of it while the block runs."""
        with contextlib.ExitStack() as stack:
            for keep in self._keep:
                stack.callback(keep().release)
            for origin in self.origins.values():
                stack.enter_context(origin.held())
            yield


class Grounds:
    """Finds what builds begin with."""

    def __init__(
        self,
        settings: Settings,
        catalogue: Catalogue,
        prepared: Prepared,
        snapshots: Snapshots,
        images: Images,
    ) -> None:
        self._settings = settings
        self._catalogue = catalogue
        self._prepared = prepared
        self._snapshots = snapshots
        self._images = images

    async def of(self, definition: Definition, build: Build, progress: Progress) -> Ground:
        """What a build begins with.

        Raises:
            StepFailed: there is no such template or image, or it cannot be had.
        """
        try:
            credentials = await self._exchanged(definition.credentials)
            if definition.template is not None:
                ground = await self._of_template(self._catalogue.get(definition.template), build)
            else:
                assert definition.image is not None
                ground = await self._of_image(definition.image, credentials, build, progress)
        except AenvError as error:
            raise StepFailed(BASE, str(error)) from error
        trusted = _registry(definition)
        origins: dict[int, Ground] = {}
        for number, step in enumerate(definition.steps, 1):
            if step.source is not None:
                try:
                    given = credentials if _host(step.source) == trusted else None
                    origins[number] = await self._origin(step.source, given, progress)
                except AenvError as error:
                    raise StepFailed(str(number), str(error)) from error
        return replace(ground, origins=origins)

    async def _exchanged(self, given: Credentials | AwsKeys | None) -> Credentials | None:
        """What registries take."""
        if not isinstance(given, AwsKeys):
            return given
        # httpx takes 150 ms to import, and a process that pulls nothing does without.
        from agentenv.image.registry import ecr

        return await ecr.login(given, Access.of(self._settings))

    async def _origin(self, source: str, credentials: Credentials | None, progress: Progress) -> Ground:
        """What a step copies from: a template as its sandboxes are, or an image."""
        if source.startswith(IMAGE):
            ground = await self._of_image(source.removeprefix(IMAGE), credentials, None, progress)
            return replace(
                ground, account=None, root=replace(ground.root, identity=f"{ground.root.identity} bare")
            )
        return await self._of_template(self._catalogue.get(source), None)

    async def _of_template(self, template: Template, build: Build | None) -> Ground:
        """A template to build on; without a build, to copy from."""
        snapshot = await self._prepared.of(template)
        layers = self._snapshots.layers(snapshot)
        resources = _resources(build, snapshot.resources)
        if build is not None and (disk_mib := grown(used_bytes(layers), resources.disk_mib, build.free_mib)):
            resources = replace(resources, disk_mib=within("minFreeDiskMb", disk_mib, 0, DISK_MIB_MAX))
        context = Context(template.default_user, template.default_workdir, dict(template.env))
        identity = f"template {template.build_id if template.rootfs else template.digest}"
        # What a template's start command started would go on beside that of the new one: so it is booted.
        same = resources == snapshot.resources and not (
            build and (template.start.command or template.init != "agent")
        )
        return Ground(
            Root(
                f"{identity} {'going on' if same else 'booted'}",
                resources,
                context,
                template.start,
                login_path=None if template.rootfs else template.env.get("PATH"),
                init=template.init,
                config=template.image_config,
            ),
            layers,
            snapshot if same else None,
            template,
            grows=resources.disk_mib > snapshot.resources.disk_mib,
            _keep=(lambda: self._snapshots.keep(snapshot),),
        )

    async def _of_image(
        self, image: str, credentials: Credentials | None, build: Build | None, progress: Progress
    ) -> Ground:
        if not self._settings.build_from_paths:
            image = source.remote_only(image)
        found = await self._images.get(image, credentials=credentials, progress=progress)
        if build is not None and (disk_mib := grown(found.size_bytes, found.disk_mib, build.free_mib)):
            found = await self._images.get(
                image, credentials=credentials, disk_mib=disk_mib, progress=progress
            )
        usual = Resources(self._settings.vcpus, self._settings.memory_mib, found.disk_mib)
        resources = _resources(build, usual)
        config = found.config
        user = found.default_user if found.default_user != "root" or config.user else USER
        workdir = config.workdir if config.workdir not in ("", "/") else ""
        context = Context(user, workdir, dict(config.env))
        return Ground(
            Root(
                f"image {found.digest}",
                resources,
                context,
                says_user=bool(config.user),
                says_workdir=bool(config.workdir),
                init=config.init,
                config=config,
            ),
            (Layer(Path(found.rootfs), "raw"),),
            account=USER if user == USER else None,
            _keep=(lambda: self._images.keep(found.digest),),
        )


def grown(used_bytes: int, disk_mib: int, free_mib: int) -> int | None:
    """The MiB of a filesystem that has so much free above what is used; None where one of `disk_mib` has."""
    wanted = (used_bytes >> 20) + free_mib
    return wanted if wanted > disk_mib else None


def used_bytes(layers: Sequence[Layer]) -> int:
    """Bytes that the layers of a disk take on the host: at least those of its files."""
    return sum(layer.path.stat().st_blocks * 512 for layer in layers)


def _registry(definition: Definition) -> str | None:
    """The one registry that credentials are for: the base's, or that of the first image copied from."""
    sources = [step.source for step in definition.steps if step.source is not None]
    images = [IMAGE + definition.image] if definition.image else sources
    return next((host for host in map(_host, images) if host is not None), None)


def _host(origin: str) -> str | None:
    """The registry of an origin that is an image of one."""
    if not origin.startswith(IMAGE):
        return None
    try:
        return reference.parse(source.remote_only(origin.removeprefix(IMAGE)).removeprefix("docker:")).host
    except InvalidRequest:
        return None


def _resources(build: Build | None, usual: Resources) -> Resources:
    if build is None:
        return usual
    return replace(usual, vcpus=build.vcpus or usual.vcpus, memory_mib=build.memory_mib or usual.memory_mib)
