"""From a SOURCE to a root filesystem image: the one entrance to this room.

A tree is put together in a private scratch directory, as root, so that owners and devices can be kept,
and made into an ext4 file. The work runs in a thread; a cancelled call waits until it has stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentenv.errors import InvalidRequest, StoreCorrupt
from agentenv.image import accounts, container, ext4, source
from agentenv.image.bootstrap import MINIMAL, System, bootstrap
from agentenv.image.config import ImageConfig
from agentenv.image.container import Image
from agentenv.image.layer import Unpacking
from agentenv.image.programs import in_thread
from agentenv.image.remote import Arriving, Registries
from agentenv.image.source import Bootstrap, Located, Remote
from agentenv.image.streams import Hashing, decompressed, members, read_faults, tar_index, tar_stream
from agentenv.image.tarring import directory_stream
from agentenv.image.tree import Budget, Tree, host_faults, remove_scratch
from agentenv.progress import EVERY_S, Counted, Progress, Tally

Filled = TypeVar("Filled")

# What the guest's init mounts on or puts files into. Any image gets those that it lacks.
MOUNT_POINTS = {
    "proc": 0o555,
    "sys": 0o555,
    "dev": 0o755,
    "run": 0o755,
    "tmp": 0o1777,
    "etc": 0o755,
    ".agentenv": 0o755,
}


@dataclass(frozen=True)
class BuiltImage:
    """A root filesystem that was made.

    `digest` names the content that it was made from; `size_bytes` is what the file takes on the
    host, `disk_mib` what the guest sees, and `needed_mib` what it would be if the image alone decided.
    """

    path: Path
    config: ImageConfig
    digest: str
    disk_mib: int
    needed_mib: int
    size_bytes: int
    default_user: str
    default_workdir: str


async def build_rootfs(
    source_text: str,
    out: Path,
    *,
    disk_mib: int,
    scratch: Path,
    progress: Progress,
    max_disk_mib: int | None = None,
    system: System = MINIMAL,
    tree: Path | None = None,
    registries: Registries | None = None,
    keep_tree: bool = False,
) -> BuiltImage:
    """Make the ext4 file `out` from a source (see `agentenv.image.source`).

    Args:
        source_text: the SOURCE.
        out: the file to make; it must not exist.
        disk_mib: MiB of the filesystem.
        max_disk_mib: MiB up to which it grows where the image needs more; unset, it does not.
        scratch: a private directory, made if missing, on a filesystem that keeps owners and
            extended attributes. Whatever is put there is removed again.
        progress: told in a few words what is being done.
        system: what a bootstrapped system holds beyond the minimum.
        tree: where the tree is put together, a private directory's path that does not exist; unset,
            in `scratch`.
        registries: how an image of a registry is got; unset, there are none.
        keep_tree: leave the tree to the caller, who has what it came for before that is removed.

    Raises:
        NotFound: no such source.
        Forbidden, Unreachable: a registry does not give it, or does not answer.
        InvalidRequest: not an image, not for this machine, ambiguous, or too large for the disk.
        StoreCorrupt: content is damaged, or is not what its digest says.
        StoreFull: no space on the host.
        HostIncapable, HostFault: the host lacks or refuses something.

    On failure or cancellation neither `out` nor the tree nor anything in `scratch` is left.
    """
    wanted = source.parse(source_text, os.path.lexists)
    with host_faults(str(scratch)):
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    build = _Build(out, disk_mib, max_disk_mib or disk_mib, scratch, tree or scratch / "tree", progress)
    try:
        if isinstance(wanted, Bootstrap):
            built = await build.from_packages(wanted, system)
        elif isinstance(wanted, Remote):
            built = await build.from_registry(wanted, registries)
        else:
            built = await build.from_files(wanted)
    except BaseException:
        keep_tree = False
        out.unlink(missing_ok=True)
        raise
    finally:
        if not keep_tree:
            progress("cleaning up")
            await in_thread(lambda: remove_scratch(build.root))
    return built


class _Build:
    def __init__(
        self, out: Path, disk_mib: int, max_disk_mib: int, scratch: Path, root: Path, progress: Progress
    ) -> None:
        self.out, self.disk_mib, self.max_disk_mib = out, disk_mib, max_disk_mib
        self.scratch, self.root = scratch, root
        self.progress = progress
        self._stop = threading.Event()

    async def from_packages(self, wanted: Bootstrap, system: System) -> BuiltImage:
        self.progress(f"installing {wanted.suite} from the mirror")
        with host_faults(str(self.root)):
            self.root.parent.mkdir(mode=0o700, exist_ok=True)
        await bootstrap(wanted.suite, self.root, system, self.scratch, self.progress)
        digest = f"sha256:{hashlib.sha256(f'{wanted.suite} {system.identity}'.encode()).hexdigest()}"
        return await self._finish(ImageConfig(env=system.env), digest)

    async def from_files(self, wanted: Located) -> BuiltImage:
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            loop.call_soon_threadsafe(self.progress, text)

        config, digest = await in_thread(lambda: self._unpack(wanted, tell), self._stop.set)
        return await self._finish(config, digest)

    async def from_registry(self, wanted: Remote, registries: Registries | None) -> BuiltImage:
        if registries is None:
            raise InvalidRequest(f"{wanted.reference} is an image of a registry, and none is asked here")
        # httpx takes 150 ms to import, and a process that pulls nothing does without.
        from agentenv.image.registry.client import Client
        from agentenv.image.registry.pull import Puller
        from agentenv.image.remote import open_remote

        repository, blobs = wanted.reference.repository, registries.blobs
        async with Client(registries.access, repository, registries.credentials) as client:
            puller = Puller(client, blobs, wanted.reference)
            arriving = await open_remote(puller, blobs)
            try:
                await self._arrive(arriving, registries)
            except StoreCorrupt:
                dropped = await in_thread(lambda: [blobs.drop_if_damaged(each) for each in arriving.found])
                if not any(dropped):
                    raise
                self.progress("fetching layers again that are damaged here")
                await in_thread(lambda: remove_scratch(self.root))
                arriving = await open_remote(puller, blobs)
                await self._arrive(arriving, registries)
        return await self._finish(arriving.image.config, arriving.image.digest)

    async def _arrive(self, arriving: Arriving, registries: Registries) -> None:
        """Unpack an image while it arrives."""
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            loop.call_soon_threadsafe(self.progress, text)

        def stop() -> None:
            self._stop.set()
            arriving.give_up()

        fetching = asyncio.create_task(arriving.fetch(registries.access.downloads, self.progress))
        try:
            await in_thread(
                lambda: self._in_tree(lambda tree: self._layers(arriving.image, tree, tell)), stop
            )
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)

    async def _finish(self, config: ImageConfig, digest: str) -> BuiltImage:
        with host_faults(str(self.root)):
            add_mount_points(self.root)
        account = accounts.default_account(_accounts(self.root), config.user)
        used = await in_thread(lambda: ext4.usage(self.root))
        needed = ext4.needed_mib(used)
        disk_mib = min(max(self.disk_mib, needed), self.max_disk_mib)
        self.progress(f"writing the filesystem ({disk_mib} MiB)")
        watching = asyncio.create_task(self._watch(used.bytes))
        try:
            await ext4.make(self.root, self.out, disk_mib, digest, used)
        finally:
            watching.cancel()
        with host_faults(str(self.out)):
            size = await in_thread(lambda: ext4.seal(self.out))
        return BuiltImage(
            path=self.out,
            config=config,
            digest=digest,
            disk_mib=disk_mib,
            needed_mib=needed,
            size_bytes=size,
            default_user=account.name,
            default_workdir=accounts.default_workdir(account, config.workdir),
        )

    async def _watch(self, size: int) -> None:
        """Tell how much of so many bytes is in the filesystem, of which mkfs.ext4 says nothing."""
        tally = Tally("writing the filesystem", size, self.progress)
        while True:
            await asyncio.sleep(EVERY_S)
            with suppress(OSError):  # it is not there yet
                tally.reach(min(self.out.stat().st_blocks * 512, size))

    # The rest runs in the thread.

    def _unpack(self, wanted: Located, tell: Progress) -> tuple[ImageConfig, str]:
        return self._in_tree(lambda tree: self._by_kind(wanted, tree, tell))

    def _in_tree(self, fill: Callable[[Tree], Filled]) -> Filled:
        tree = Tree(self.root, Budget(self.max_disk_mib << 20), self._stop)
        with host_faults(str(self.root)):
            self.root.mkdir(mode=0o755)
            self.root.chmod(0o755)
            return fill(tree)

    def _by_kind(self, wanted: Located, tree: Tree, tell: Progress) -> tuple[ImageConfig, str]:
        path = wanted.path
        if path.is_dir():
            if wanted.kind == "oci" or (wanted.kind is None and container.is_layout(path)):
                tell(f"checking {path}")
                image = container.open_layout(path, wanted.tag, wanted.digest, tree.check)
                return self._layers(image, tree, tell)
            return self._directory(wanted, tree, tell)
        if not path.is_file():
            raise InvalidRequest(f"{path} is neither a file nor a directory")
        if wanted.kind == "oci":
            raise InvalidRequest(f"{path} is not an OCI layout, which is a directory")
        limit = 2 * self.max_disk_mib << 20
        if wanted.kind == "archive" or (wanted.kind is None and may_be_archive(path)):
            tell(f"reading {path.name}")
            with container.plain_file(path, self.scratch, limit, tree.check) as plain:
                if wanted.kind == "archive" or source.is_archive(container.ArchiveMembers(plain)):
                    image = container.open_archive(plain, wanted.tag, wanted.digest, tree.check)
                    return self._layers(image, tree, tell)
        return self._tarball(wanted, tree, tell)

    def _layers(self, image: Image, tree: Tree, tell: Progress) -> tuple[ImageConfig, str]:
        for number, layer in enumerate(image.layers, 1):
            tell(what := f"unpacking layer {number} of {len(image.layers)}")
            with layer.open() as file, read_faults(f"the layer {layer.name}"):
                passing = Counted(file, Tally(what, layer.size, tell).add)
                with decompressed(passing) as plain:
                    container.unpack_layer(layer, plain, tree)
        return image.config, image.digest

    def _tarball(self, wanted: Located, tree: Tree, tell: Progress) -> tuple[ImageConfig, str]:
        _no_reference(wanted)
        tell(what := f"unpacking {wanted.path.name}")
        with wanted.path.open("rb") as file:
            size = wanted.path.stat().st_size
            passing = Hashing(Counted(file, Tally(what, size, tell).add))
            with read_faults(str(wanted.path)):
                with decompressed(passing) as plain, tar_stream(plain) as tar:
                    Unpacking(tree, whiteouts=False).run(tar)
                passing.drain()
        return _not_empty(wanted, tree), passing.digest

    def _directory(self, wanted: Located, tree: Tree, tell: Progress) -> tuple[ImageConfig, str]:
        _no_reference(wanted)
        tell(what := f"copying {wanted.path}")
        with directory_stream(wanted.path) as stream:
            passing = Hashing(Counted(stream, Tally(what, -1, tell).add))
            with read_faults(str(wanted.path)), tar_stream(passing) as tar:
                Unpacking(tree, whiteouts=False).run(tar)
                passing.drain()
        return _not_empty(wanted, tree), passing.digest


def may_be_archive(path: Path) -> bool:
    """Whether a tarball is a saved image, by its names if plain, by its first one if compressed.

    Raises:
        InvalidRequest: it is no tarball.
    """
    with path.open("rb") as file:
        if source.compression_of(file.read(8)) == "plain":
            file.seek(0)
            with read_faults(str(path)), tar_index(file) as tar:
                return source.is_archive(member.name for member in members(tar))
        file.seek(0)
        with read_faults(str(path)), decompressed(file) as plain, tar_stream(plain) as tar:
            first = tar.next()
            return first is not None and source.starts_archive(first.name)


def add_mount_points(root: Path) -> None:
    """Give the tree the directories that every guest needs, leaving those that it has."""
    tree = Tree(root, Budget(1 << 30))
    for name, mode in MOUNT_POINTS.items():
        if tree.directory(name, make=False) is None:
            tree.remove(name)
            tree.make_directory(name)
            os.chmod(tree.at(name), mode)  # noqa: PTH101


def _accounts(root: Path) -> dict[str, accounts.Account]:
    """The image's accounts; /etc may be a link, and the file need not exist or be one."""
    tree = Tree(root, Budget(0))
    etc = tree.directory("etc", make=False)
    status = tree.status(f"{etc}/passwd") if etc is not None else None
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_size > 1 << 20:
        return {}
    return dict(accounts.parse_passwd(Path(tree.at(f"{etc}/passwd")).read_text(errors="replace")))


def _not_empty(wanted: Located, tree: Tree) -> ImageConfig:
    """The configuration of a root filesystem without one, if there is a root filesystem."""
    if tree.budget.entries == 0:
        raise InvalidRequest(f"there is nothing in {wanted.path}", remedy="give a root filesystem")
    return ImageConfig()


def _no_reference(wanted: Located) -> None:
    if wanted.tag or wanted.digest:
        raise InvalidRequest(
            f"{wanted.path} is a root filesystem, not an image, and has no tags", remedy="give the path alone"
        )
