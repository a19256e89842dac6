"""Making what a guest boots with, as far as it is not there already: `build`, `load`, `stale`."""

from __future__ import annotations

import fcntl
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from agentenv.config import Settings
from agentenv.errors import HostIncapable
from agentenv.guestimage import busybox, drive, initramfs, kernel, retention, tools
from agentenv.guestimage.manifest import Manifest, Part, digest_file, digest_files, key_of, read, write
from agentenv.guestimage.steps import Progress, Step, begin, silent, step
from agentenv.vmm.machine import GuestFiles

_HERE = Path(__file__).parent
_KEPT = 3  # of each kind of file: a node that runs still boots with those it began with
_TAG = 16  # digits of a file's digest that its name has


@dataclass(frozen=True)
class Built:
    """The parts in force, and the names of those that this call made."""

    manifest: Manifest
    made: tuple[str, ...]


def load(settings: Settings, recorded: Mapping[str, str] | None = None) -> GuestFiles:
    """The files that a machine boots with: those in force, or where they are kept those that a snapshot was
    made with, by the digests in its fingerprint `recorded`.

    Raises:
        HostIncapable: they were never made, or one is gone.
    """
    manifest = read(settings.guest_dir)
    if manifest is None:
        raise HostIncapable(f"no guest files in {settings.guest_dir}", remedy="run aenv setup")
    if recorded is not None and (found := _recorded(settings.guest_dir, manifest, recorded)) is not None:
        return found
    paths = [settings.guest_dir / part.file for part in (manifest.kernel, manifest.initramfs, manifest.tools)]
    for path in paths:
        if not path.is_file():
            raise HostIncapable(f"guest file {path} is gone", remedy="run aenv setup")
    return GuestFiles(*paths)


def _recorded(directory: Path, manifest: Manifest, digests: Mapping[str, str]) -> GuestFiles | None:
    kernel_file = Path(manifest.kernel.file).name
    paths = (
        directory / f"kernel-{digests.get('kernel', '')[:_TAG]}" / kernel_file,
        directory / f"initramfs-{digests.get('initramfs', '')[:_TAG]}",
        directory / f"tools-{digests.get('tools', '')[:_TAG]}",
    )
    return GuestFiles(*paths) if all(path.is_file() for path in paths) else None


def stale(settings: Settings) -> list[str]:
    """Which parts no longer fit this program, its interpreter or its settings; empty when all fit.

    Raises:
        HostIncapable: as `load`.
    """
    load(settings)
    manifest = read(settings.guest_dir)
    assert manifest is not None  # load read it
    wanted = {
        "kernel": _kernel_key(settings, manifest.kernel),
        "initramfs": _initramfs_key(manifest.kernel, manifest.busybox),
        "tools": _tools_key(manifest.busybox),
    }
    parts = {"kernel": manifest.kernel, "initramfs": manifest.initramfs, "tools": manifest.tools}
    return [name for name, part in parts.items() if part.key != wanted[name]]


def build(settings: Settings, progress: Progress = silent, *, refresh: bool = False) -> Built:
    """Make what is missing or no longer fits; with `refresh`, look for a newer kernel too.

    Blocking: a first run takes about half a minute, most of it the kernel's download.

    Raises:
        HostIncapable: the host lacks a program, or its sources a package.
        HostFault: a program failed, as when a package could not be fetched.
        InvalidRequest: the settings name a kernel that is none.
    """
    settings.guest_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _alone(settings.guest_dir):
        return _Build(settings, progress, refresh).run()


class _Build:
    def __init__(self, settings: Settings, progress: Progress, refresh: bool) -> None:
        self.settings = settings
        self.directory = settings.guest_dir
        self.progress = progress
        self.refresh = refresh
        self.old = read(self.directory)
        self.made: list[str] = []
        self.found: kernel.Kernel | None = None  # set when this call made the kernel

    def run(self) -> Built:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=self.directory) as scratch:
            work = Path(scratch)
            box = self._part("busybox", "package", lambda: self._busybox(work))
            image = self._part("kernel", self._kernel_key(), lambda: self._kernel(work), self.refresh)
            booted = self.found or self._known(image)
            key = _initramfs_key(image, box)
            ramfs = self._part("initramfs", key, lambda: self._initramfs(work, booted, box))
            drive_part = self._part("tools", _tools_key(box), lambda: self._tools(work, box))
        manifest = Manifest(box, image, ramfs, drive_part, booted.release, self._modules(booted))
        if manifest != self.old:
            write(self.directory, manifest)
            if (referred := retention.referred(self.settings.database)) is not None:
                _prune(self.directory, manifest, referred)
        return Built(manifest, tuple(self.made))

    def _part(self, name: str, key: str, make: Callable[[], Part], refresh: bool = False) -> Part:
        with step(name, self.progress) as current:
            old: Part | None = getattr(self.old, name, None)
            if old and old.key == key and (self.directory / old.file).is_file() and not refresh:
                current.changed = False
                current.detail = old.detail
                return old
            begin(name, self.progress)
            part = make()
            part = Part(part.file, part.digest, key, part.detail)
            self._note(name, current, part, old)
            return part

    def _note(self, name: str, current: Step, part: Part, old: Part | None) -> None:
        current.detail = part.detail
        current.changed = old is None or part.digest != old.digest
        if current.changed:
            self.made.append(name)

    def _busybox(self, work: Path) -> Part:
        origin = busybox.copy_to(work / "busybox")
        (work / "busybox").chmod(0o755)
        return self._keep(work / "busybox", "busybox", origin)

    def _kernel(self, work: Path) -> Part:
        if self.settings.kernel is not None:
            found = kernel.at(self.settings.kernel)
            (work / "kernel").mkdir()
        else:
            found = kernel.fetch(work / "kernel")
        image = kernel.place(found, work / "kernel")
        digest = digest_file(image)
        home = self.directory / f"kernel-{digest[:_TAG]}"
        if not home.exists():
            (work / "kernel").rename(home)
        own = found.modules is not None and found.modules.is_relative_to(work)
        self.found = replace(
            found, image=home / image.name, modules=home / "modules" if own else found.modules
        )
        return Part(f"{home.name}/{image.name}", digest, "", f"Linux {found.release} from {found.origin}")

    def _modules(self, booted: kernel.Kernel) -> str | None:
        """Where the kernel's modules are: below the guest directory if they are its own."""
        where = booted.modules
        if where is not None and where.is_relative_to(self.directory):
            where = where.relative_to(self.directory)
        return str(where) if where else None

    def _kernel_key(self) -> str:
        return _kernel_key(self.settings, self.old.kernel if self.old and not self.refresh else None)

    def _known(self, image: Part) -> kernel.Kernel:
        """The kernel that an earlier call made."""
        assert self.old is not None
        modules = self.directory / self.old.modules if self.old.modules else None
        return kernel.Kernel(self.directory / image.file, self.old.release, modules, image.detail)

    def _initramfs(self, work: Path, booted: kernel.Kernel, box: Part) -> Part:
        command = tools.command(tools.interpreter().version)
        data = initramfs.pack(booted, self.directory / box.file, command)
        (work / "initramfs").write_bytes(data)
        return self._keep(work / "initramfs", "initramfs", f"{len(data) / 1e6:.1f} MB")

    def _tools(self, work: Path, box: Part) -> Part:
        tree = work / "tree"
        tree.mkdir()
        tools.fill(tree, self.directory / box.file)
        drive.make(tree, work / "tools")
        size = (work / "tools").stat().st_size
        version = ".".join(map(str, sys.version_info[:3]))
        return self._keep(work / "tools", "tools", f"agent on CPython {version}, {size / 1e6:.0f} MB")

    def _keep(self, path: Path, name: str, detail: str) -> Part:
        digest = digest_file(path)
        target = self.directory / f"{name}-{digest[:_TAG]}"
        if path.stat().st_mode & 0o777 != 0o755:
            path.chmod(0o644)
        path.replace(target)
        return Part(target.name, digest, "", detail)


def _kernel_key(settings: Settings, old: Part | None) -> str:
    """Where the settings name no kernel, the one in force fits; one at a path is looked at each time."""
    form = digest_files([_HERE / "bzimage.py"], _HERE)[:16]
    if settings.kernel is None:
        return old.key if old and old.key.startswith(form) else f"{form} package"
    try:
        status = settings.kernel.stat()
    except OSError:
        return f"{form} path {settings.kernel}, absent"
    return f"{form} path {settings.kernel} {status.st_size} {status.st_mtime_ns}"


def _initramfs_key(image: Part, box: Part) -> str:
    sources = [_HERE / name for name in ("initramfs.py", "modules.py", "cpio.py", "kernel.py", "init")]
    command = tools.command(tools.interpreter().version)
    return key_of(image.digest, box.digest, digest_files(sources, _HERE), *command)


def _tools_key(box: Part) -> str:
    sources = [_HERE / name for name in ("tools.py", "stdlib.py", "libraries.py", "drive.py")]
    agent = tools.agent_sources()
    python = tools.interpreter()
    identity = f"{sys.version} {python.program} {digest_file(python.program)}"
    return key_of(identity, box.digest, digest_files(sources, _HERE), digest_files(agent, agent[0].parent))


def _prune(directory: Path, manifest: Manifest, referred: Collection[str]) -> None:
    """Remove all but the newest few of what earlier builds left, and what snapshots cannot do without."""
    tags = {digest[:_TAG] for digest in referred}
    in_force = {part.file.partition("/")[0] for part in (manifest.busybox, manifest.kernel)}
    in_force |= {manifest.initramfs.file, manifest.tools.file}
    for pattern in ("busybox-*", "kernel-*", "initramfs-*", "tools-*"):
        found = sorted(directory.glob(pattern), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in found[_KEPT:]:
            if path.name in in_force or path.name.rpartition("-")[2] in tags:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the directory's lock: two setups at once would do everything twice."""
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
