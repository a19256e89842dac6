"""The SOURCE of an image: its grammar, and what kind of thing a path is.

debootstrap:SUITE            packages from the distribution's mirror
oci:DIR[:TAG][@DIGEST]       an OCI layout directory
archive:FILE[:REF]           what `docker save` or `podman save` wrote (plain, gzip, zstd …)
rootfs:PATH                  a tarball of a root filesystem, or a directory
docker:IMAGE                 an image of a registry (also docker://IMAGE)
PATH[:TAG][@DIGEST]          any of the middle three, told apart by looking
IMAGE                        where there is no such path: an image of a registry
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentenv.errors import InvalidRequest, NotFound
from agentenv.image import reference
from agentenv.image.reference import Reference

Kind = Literal["oci", "archive", "rootfs"]

SOURCE_FORMS = (
    "an image of a registry, a path (OCI layout, docker/podman archive, rootfs tarball or directory)"
    " or debootstrap:SUITE"
)

_SUITE = re.compile(r"[a-z][a-z0-9.-]{1,40}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# What is surely meant as a path, though there be none.
_PATH_LIKE = re.compile(r"[./~].*|.*\.(tar|tgz|txz|tbz2?)(\.[a-z0-9]+)?(:[^/]*)?", re.DOTALL)
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*(:[A-Za-z0-9_][A-Za-z0-9._-]*)?")
# What the first member of a saved image is called; no root filesystem begins with any of these.
_ARCHIVE_MEMBER = re.compile(
    r"(manifest\.json|index\.json|oci-layout|repositories|blobs(/.*)?|[0-9a-f]{64}(/.*|\.json|\.tar)?)"
)


@dataclass(frozen=True)
class Bootstrap:
    """A distribution's suite, installed from its mirror."""

    suite: str


@dataclass(frozen=True)
class Located:
    """Something on this host. `kind` is None where it must be found out by looking."""

    path: Path
    kind: Kind | None
    tag: str | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Remote:
    """An image of a registry. `assumed` where it may have been meant as a path that does not exist."""

    reference: Reference
    assumed: bool = False


Source = Bootstrap | Located | Remote


def parse(source: str, exists: Callable[[str], bool]) -> Source:
    """What `source` asks for. `exists` tells whether a path exists (a path may hold a colon).

    Raises:
        InvalidRequest: the form is not one of the above.
        NotFound: what can only be a path does not exist.
    """
    scheme, colon, rest = source.partition(":")
    if colon and scheme == "debootstrap":
        if not _SUITE.fullmatch(rest):
            raise InvalidRequest(
                f"{rest!r} is not the name of a suite", remedy="such as debootstrap:bookworm"
            )
        return Bootstrap(rest)
    if colon and scheme == "docker":
        return Remote(reference.parse(rest.removeprefix("//")))
    kinds: dict[str, Kind] = {"oci": "oci", "archive": "archive", "rootfs": "rootfs"}
    kind = kinds.get(scheme) if colon and not exists(source) else None
    found = _located(rest if kind else source, kind, exists)
    if found is not None:
        return found
    if kind or _PATH_LIKE.fullmatch(source):
        raise NotFound(f"{source}: no such file or directory", remedy=f"give {SOURCE_FORMS}")
    return Remote(reference.parse(source), assumed=True)


def remote_only(source: str) -> str:
    """The same source where it is an image of a registry, said so that no file of this host can be meant.

    Raises:
        InvalidRequest: it is something else.
    """
    try:
        meant = parse(source, lambda _: False)
    except NotFound:
        meant = None
    if not isinstance(meant, Remote):
        raise InvalidRequest(
            f"{source} is no image of a registry",
            remedy="AENV_BUILD_FROM_PATHS lets builds and creates read images from this host's files",
        )
    return f"docker:{source.removeprefix('docker:').removeprefix('//')}"


def _located(text: str, kind: Kind | None, exists: Callable[[str], bool]) -> Located | None:
    if not text:
        raise InvalidRequest("the source is empty", remedy=f"give {SOURCE_FORMS}")
    if exists(text):
        return Located(Path(text), kind)
    path, digest = _split(text, "@", _DIGEST)
    if digest and exists(path):
        return Located(Path(path), kind, None, digest)
    for candidate, tag in _splits(path):
        if exists(candidate):
            return Located(Path(candidate), kind, tag, digest)
    return None


def _split(text: str, separator: str, form: re.Pattern[str]) -> tuple[str, str | None]:
    head, found, tail = text.rpartition(separator)
    return (head, tail) if found and form.fullmatch(tail) else (text, None)


def _splits(text: str) -> Iterable[tuple[str, str]]:
    """Each way to cut PATH:TAG, the longest path first (a tag may itself be NAME:TAG)."""
    position = len(text)
    while (position := text.rfind(":", 0, position)) > 0:
        if _TAG.fullmatch(text[position + 1 :]):
            yield text[:position], text[position + 1 :]


def starts_archive(first_member: str) -> bool:
    """Whether a tarball whose first member has this name may be a saved image."""
    return bool(_ARCHIVE_MEMBER.fullmatch(first_member.removeprefix("./").rstrip("/")))


def is_archive(names: Iterable[str]) -> bool:
    """Whether a tarball with these members is a saved image, of either format."""
    present = {name.removeprefix("./") for name in names}
    return "manifest.json" in present or {"oci-layout", "index.json"} <= present


Compression = Literal["plain", "gzip", "zstd", "xz", "bzip2"]
_MAGIC: tuple[tuple[bytes, Compression], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"BZh", "bzip2"),
)


def compression_of(head: bytes) -> Compression:
    """The compression that the first bytes of a file tell; a skippable zstd frame counts as zstd."""
    if len(head) >= 4 and head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50:
        return "zstd"
    return next((name for magic, name in _MAGIC if head.startswith(magic)), "plain")
