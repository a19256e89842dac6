"""Fetching packages through the host's own apt, and unpacking them without installing.

Apt knows the host's mirror, proxy and certificates, so nothing here does.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cmp_to_key
from pathlib import Path

from agentenv.errors import HostFault, HostIncapable
from agentenv.guestimage.commands import run


@dataclass(frozen=True)
class Package:
    """One version of a package that apt can fetch, with the names its Depends field begins with."""

    name: str
    version: str
    depends: tuple[str, ...]


def newest(name: str) -> Package:
    """The highest version of a package that the host's sources offer, whatever apt would prefer.

    Raises:
        HostIncapable: there is no apt, or its sources have no such package.
    """
    found = available(name)
    if not found:
        raise HostIncapable(
            f"apt knows no package {name}",
            remedy="run apt-get update; /etc/apt must have the distribution's main section as a source",
        )
    return max(found, key=cmp_to_key(_compare))


def available(name: str) -> list[Package]:
    """Every version of a package that the host's sources offer."""
    try:
        return parse_show(run(["apt-cache", "show", "--", name], package="apt"))
    except HostIncapable:
        raise HostIncapable(
            "no apt on this host, so no kernel package can be fetched",
            remedy="set AENV_KERNEL to a guest kernel (a bzImage)",
        ) from None
    except HostFault:  # apt-cache fails when it knows no such package
        return []


def parse_show(text: str) -> list[Package]:
    """Packages from what `apt-cache show` prints: paragraphs of `Field: value` lines."""
    packages = []
    for paragraph in text.split("\n\n"):
        lines = (line.partition(":") for line in paragraph.splitlines() if line[:1].strip())
        fields = {key: value.strip() for key, _, value in lines}
        if "Package" in fields and "Version" in fields:
            names = [part.split()[0] for part in fields.get("Depends", "").split(",") if part.strip()]
            packages.append(Package(fields["Package"], fields["Version"], tuple(names)))
    return packages


def _compare(left: Package, right: Package) -> int:
    if left.version == right.version:
        return 0
    higher = subprocess.run(
        ["dpkg", "--compare-versions", left.version, "gt", right.version], check=False
    ).returncode
    return 1 if higher == 0 else -1


@contextmanager
def unpacked(packages: Sequence[Package]) -> Iterator[Path]:
    """A temporary directory with the contents of packages, fetched by apt; gone afterwards.

    Raises:
        HostFault: apt could not fetch one, or it does not unpack.
    """
    with _download_directory() as downloads:
        names = [f"{package.name}={package.version}" for package in packages]
        _download(names, downloads)
        tree = downloads / "tree"
        for archive in sorted(downloads.glob("*.deb")):
            run(["dpkg-deb", "-x", archive, tree], package="dpkg")
        yield tree


def _download(names: Sequence[str], directory: Path) -> None:
    try:
        run(["apt-get", "-q", "download", "--", *names], package="apt", cwd=directory)
    except HostIncapable:
        raise
    except HostFault as fault:
        raise HostFault(
            f"apt cannot fetch {' '.join(names)}: {fault.message}",
            remedy="run apt-get update; check the network, the mirror in /etc/apt and apt's proxy settings",
        ) from None


@contextmanager
def _download_directory() -> Iterator[Path]:
    """A directory that apt's own user may write to, or apt warns and fetches as root."""
    path = Path(tempfile.mkdtemp(prefix="aenv-apt-"))
    try:
        if os.geteuid() == 0:
            with suppress(KeyError):  # no such user: apt does not drop privileges here
                os.chown(path, pwd.getpwnam("_apt").pw_uid, -1)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
