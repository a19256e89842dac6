"""The guest's kernel: the distribution's cloud kernel from its package, or one from a path."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import HostFault
from agentenv.guestimage import apt, bzimage

# Meta packages, best first: Debian's kernel for clouds, then what Ubuntu calls virtual. Each
# depends on the package of one release, whose modules Ubuntu keeps in a package of their own; since
# Linux 7, Debian's depends in turn on three: the image (binary), the modules, what is built in (base).
META_PACKAGES = ("linux-image-cloud-amd64", "linux-image-virtual")
_RELEASE_PACKAGE = re.compile(r"linux-(?:image|binary|modules|base)-(?:unsigned-)?\d.*")


@dataclass(frozen=True)
class Kernel:
    """A kernel image, its release (as `uname -r` says it) and its modules, if it has any."""

    image: Path
    release: str
    modules: Path | None
    origin: str


def fetch(target: Path) -> Kernel:
    """Unpack the distribution's newest cloud kernel into `target`, which must not exist.

    Raises:
        HostIncapable: no apt, or no kernel package in its sources.
        HostFault: the package could not be fetched, or is not what it should be.
    """
    packages = resolve()
    with apt.unpacked(packages) as tree:
        images = sorted([*tree.glob("boot/vmlinuz-*"), *tree.glob("usr/lib/modules/*/vmlinuz")])
        if not images:
            raise HostFault(f"no kernel image in {' '.join(package.name for package in packages)}")
        modules = next(iter(sorted(tree.glob("**/lib/modules/*"))), None)
        target.mkdir(parents=True)
        shutil.copyfile(images[0], target / "vmlinuz")
        if modules is not None:
            shutil.copytree(modules, target / "modules", symlinks=True, ignore=_images)
    image = target / "vmlinuz"
    origin = f"{packages[0].name} {packages[0].version}"
    return Kernel(image, bzimage.release_of(image), target / "modules" if modules else None, origin)


def _images(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("vmlinuz")]


def resolve() -> list[apt.Package]:
    """The packages that hold the kernel of one release: the image's first, then the modules'."""
    for name in META_PACKAGES:
        if apt.available(name):
            return _real_packages(apt.newest(name))
    return [apt.newest(META_PACKAGES[0])]  # raises, naming the package


def _real_packages(meta: apt.Package) -> list[apt.Package]:
    found: list[apt.Package] = []
    names = list(meta.depends)
    while names:
        name = names.pop(0)
        if _RELEASE_PACKAGE.fullmatch(name) and name not in {package.name for package in found}:
            package = apt.newest(name)
            found.append(package)
            names.extend(package.depends)
    if not found:
        raise HostFault(f"package {meta.name} {meta.version} depends on no kernel image")
    return found


def at(path: Path) -> Kernel:
    """A kernel that the operator names; its modules are looked for beside it, then on the host.

    Raises:
        InvalidRequest: there is no kernel image at that path.
    """
    release = bzimage.release_of(path)
    above = [path.parent / "modules", path.parent / "lib/modules" / release]
    places = [*above, path.parent.parent / "lib/modules" / release, Path("/lib/modules") / release]
    return Kernel(path, release, next((place for place in places if place.is_dir()), None), f"path {path}")


def place(found: Kernel, directory: Path) -> Path:
    """Put what machines boot into a directory: the kernel itself if it can be taken out of its image."""
    plain = bzimage.unpacked(found.image.read_bytes())
    image = directory / "vmlinuz"
    if plain is not None:
        image.unlink(missing_ok=True)
        image = directory / "vmlinux"
        image.write_bytes(plain)
    elif found.image != image:
        shutil.copyfile(found.image, image)
    image.chmod(0o644)
    return image
