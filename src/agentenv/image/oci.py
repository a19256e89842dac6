"""OCI documents: which manifest of a layout is meant, and what it lists.

Formats: https://github.com/opencontainers/image-spec (image-layout.md, image-index.md, manifest.md),
and Docker's older media types for the same. The choice is pure; reading goes through `Blobs`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

from agentenv.errors import InvalidRequest, StoreCorrupt
from agentenv.image.config import DOCUMENT_LIMIT
from agentenv.image.streams import CHUNK, Hashing

PLATFORM = ("linux", "amd64")
INDEX_DEPTH = 4  # nested indexes; two are usual

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
CONFIG_TYPES = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
    "application/octet-stream",  # what early tools wrote
)
_REF_NAMES = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REMEDY = "make or fetch the image again"


class Blobs(Protocol):
    """Content by digest."""

    def open(self, digest: str) -> IO[bytes]:
        """The content's bytes. Raises StoreCorrupt if there is none of that digest."""


@dataclass(frozen=True)
class Descriptor:
    """A reference to content: media type, digest, size in bytes, and how an index describes it."""

    media_type: str
    digest: str
    size: int
    names: tuple[str, ...] = ()
    platform: tuple[str, str] | None = None

    @property
    def is_index(self) -> bool:
        return self.media_type in INDEX_TYPES

    @property
    def fits(self) -> bool:
        """Whether it may be for this platform; an image without one is asked for its own."""
        return self.platform is None or self.platform == PLATFORM

    def answers(self, tag: str) -> bool:
        """Whether it carries that tag, be it as `TAG` or `NAME:TAG`."""
        return any(
            name == tag or name.rpartition(":")[2] == tag or name.endswith(f"/{tag}") for name in self.names
        )


@dataclass(frozen=True)
class Manifest:
    """One image: its own digest, and its configuration and layers, lowest first."""

    digest: str
    config: Descriptor
    layers: tuple[Descriptor, ...]


def descriptor(value: object) -> Descriptor:
    """Read a descriptor object."""
    if not isinstance(value, Mapping):
        raise StoreCorrupt("the image has a descriptor that is not an object", remedy=_REMEDY)
    digest, size = value.get("digest"), value.get("size")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise StoreCorrupt(f"the image refers to {digest!r}, which is no sha256 digest", remedy=_REMEDY)
    if not isinstance(size, int) or size < 0:
        raise StoreCorrupt(f"the image gives {digest} the size {size!r}", remedy=_REMEDY)
    notes = value.get("annotations") or {}
    platform = value.get("platform")
    return Descriptor(
        media_type=str(value.get("mediaType") or ""),
        digest=digest,
        size=size,
        names=tuple(str(notes[key]) for key in _REF_NAMES if key in notes),
        platform=(str(platform.get("os")), str(platform.get("architecture"))) if platform else None,
    )


def descriptors(document: Mapping[str, Any], key: str) -> tuple[Descriptor, ...]:
    """The list of descriptors under `key`."""
    values = document.get(key)
    if not isinstance(values, list):
        raise StoreCorrupt(f"the image's document has no list {key!r}", remedy=_REMEDY)
    return tuple(descriptor(value) for value in values)


def choose(entries: Sequence[Descriptor], tag: str | None, digest: str | None) -> Descriptor:
    """The entry of a layout's index that is meant.

    Raises:
        InvalidRequest: none is, or several are; the message lists the tags.
    """
    usable = [entry for entry in entries if entry.fits and _known(entry)]
    if digest is not None:
        usable = [entry for entry in usable if entry.digest == digest]
    if tag is not None:
        usable = [entry for entry in usable if entry.answers(tag)]
    elif len({entry.digest for entry in usable}) > 1:
        usable = [entry for entry in usable if entry.answers("latest")] or usable
    wanted = {entry.digest: entry for entry in usable}
    if len(wanted) == 1:
        return next(iter(wanted.values()))
    tags = ", ".join(sorted({name for entry in entries for name in entry.names})) or "none"
    if not wanted:
        asked = f"{':' + tag if tag else ''}{'@' + digest if digest else ''}"
        raise InvalidRequest(
            f"no image{' ' + asked if asked else ''} for {'/'.join(PLATFORM)} there",
            remedy=f"tags there: {tags}",
        )
    raise InvalidRequest(
        "several images there", remedy=f"say which, as PATH:TAG or PATH@DIGEST; tags: {tags}"
    )


def _known(entry: Descriptor) -> bool:
    return not entry.media_type or entry.media_type in INDEX_TYPES + MANIFEST_TYPES


def read_document(blobs: Blobs, wanted: Descriptor) -> dict[str, Any]:
    """A JSON object by descriptor, its digest verified."""
    if wanted.size > DOCUMENT_LIMIT:
        raise StoreCorrupt(f"{wanted.digest} is a document of {wanted.size} bytes", remedy=_REMEDY)
    with blobs.open(wanted.digest) as file:
        data = file.read(DOCUMENT_LIMIT + 1)
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if found != wanted.digest:
        raise StoreCorrupt(f"{wanted.digest} has the digest {found}", remedy=_REMEDY)
    return parse_object(data, wanted.digest)


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object out of bytes."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreCorrupt(f"{what} is not JSON: {error}", remedy=_REMEDY) from None
    if not isinstance(document, dict):
        raise StoreCorrupt(f"{what} is not a JSON object", remedy=_REMEDY)
    return document


def find_manifest(blobs: Blobs, index: Mapping[str, Any], tag: str | None, digest: str | None) -> Manifest:
    """The manifest that a layout's index leads to, through nested indexes."""
    entry = choose(descriptors(index, "manifests"), tag, digest)
    for _ in range(INDEX_DEPTH):
        document = read_document(blobs, entry)
        if not entry.is_index and "manifests" not in document:
            return manifest(document, entry.digest)
        entry = choose(descriptors(document, "manifests"), None, None)
    raise StoreCorrupt(f"the image's indexes are nested deeper than {INDEX_DEPTH}", remedy=_REMEDY)


def manifest(document: Mapping[str, Any], digest: str) -> Manifest:
    """Read the manifest of one image.

    Raises:
        InvalidRequest: it is of Docker's first format, or lists something else than an image.
        StoreCorrupt: it lacks something.
    """
    if document.get("schemaVersion") == 1:
        raise InvalidRequest(
            "the image has Docker's first manifest format, which names no configuration",
            remedy="push it again with a tool of the last years",
        )
    read = Manifest(digest, descriptor(document.get("config")), descriptors(document, "layers"))
    if read.config.media_type and read.config.media_type not in CONFIG_TYPES:
        raise InvalidRequest(f"this is no image but {read.config.media_type}", remedy="see its name and tag")
    return read


def for_platform(index: Mapping[str, Any]) -> Descriptor:
    """The entry of an image's index for this platform: the first one, as Docker takes it.

    Raises:
        InvalidRequest: there is none; the message lists the platforms.
    """
    entries = descriptors(index, "manifests")
    for entry in entries:
        if entry.platform == PLATFORM and _known(entry):
            return entry
    for entry in entries:
        if entry.platform is None and _known(entry):
            return entry
    platforms = ", ".join(sorted({"/".join(entry.platform) for entry in entries if entry.platform})) or "none"
    raise InvalidRequest(f"the image is not for {'/'.join(PLATFORM)}", remedy=f"platforms there: {platforms}")


def check_platform(config: Mapping[str, Any]) -> None:
    """Refuse an image for another machine."""
    found = (str(config.get("os") or PLATFORM[0]), str(config.get("architecture") or PLATFORM[1]))
    if found != PLATFORM:
        raise InvalidRequest(
            f"the image is for {'/'.join(found)}, and this node runs {'/'.join(PLATFORM)}",
            remedy=f"fetch the {'/'.join(PLATFORM)} variant",
        )


def diff_ids(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """The digests that the unpacked layers must have, as many as there are layers."""
    rootfs = config.get("rootfs")
    ids = rootfs.get("diff_ids") if isinstance(rootfs, Mapping) else None
    if not isinstance(ids, list) or len(ids) != layers:
        raise StoreCorrupt(
            f"the image has {layers} layers and digests for {len(ids) if isinstance(ids, list) else 'none'}",
            remedy=_REMEDY,
        )
    return tuple(str(value) for value in ids)


def verify(blobs: Blobs, wanted: Descriptor, check: Callable[[], None]) -> None:
    """Read content through and compare its digest; `check` is called on the way.

    Raises:
        StoreCorrupt: the content is not what its digest says.
    """
    with blobs.open(wanted.digest) as file:
        passing = Hashing(file)
        while passing.read(CHUNK):
            check()
    if passing.digest != wanted.digest or passing.count != wanted.size:
        raise StoreCorrupt(f"the layer {wanted.digest} has the digest {passing.digest}", remedy=_REMEDY)
