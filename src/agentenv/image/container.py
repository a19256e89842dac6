"""Images on this host's disk: OCI layout directories, and archives of both formats.

Each kind is opened as an `Image`: configuration, layers from the bottom up and the digest that
names the whole. An archive is read in place by an index of its members; a compressed one is
first written out plain into the scratch directory.
"""

from __future__ import annotations

import hashlib
import io
import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agentenv.errors import InvalidRequest, StoreCorrupt
from agentenv.image import oci
from agentenv.image.config import DOCUMENT_LIMIT, ImageConfig
from agentenv.image.layer import Unpacking
from agentenv.image.source import compression_of, is_archive
from agentenv.image.streams import (
    CHUNK,
    Hashing,
    Readable,
    Slice,
    decompressed,
    members,
    read_faults,
    tar_index,
    tar_stream,
)
from agentenv.image.tree import Tree, host_faults

_REMEDY = "make or fetch the image again"
_HEX_NAME = re.compile(r"(?:.*/)?([0-9a-f]{64})(?:\.json)?")


@dataclass(frozen=True)
class ImageLayer:
    """A layer: how to open it (compressed or not), the digest of its plain bytes, and the bytes to be read
    (-1: nobody knows)."""

    name: str
    open: Callable[[], IO[bytes]]
    diff_id: str
    size: int = -1


@dataclass(frozen=True)
class Image:
    """An image ready to be unpacked. `digest` is its configuration's, which names the plain layers as well:
    the same for one image, however it is packed and wherever it comes from."""

    digest: str
    config: ImageConfig
    layers: tuple[ImageLayer, ...]


class LayoutBlobs:
    """The `blobs` of an OCI layout directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self, digest: str) -> IO[bytes]:
        path = self._directory / "blobs" / digest.replace(":", "/", 1)
        try:
            return path.open("rb")
        except FileNotFoundError:
            raise StoreCorrupt(f"{self._directory} lacks the blob {digest}", remedy=_REMEDY) from None


class ArchiveMembers:
    """Regular files of a plain tarball by name, links between them followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        with path.open("rb") as file, read_faults(str(path)), tar_index(file) as tar:
            for member in members(tar):
                name = posixpath.normpath(member.name)
                if member.isreg() and not member.issparse():
                    self._places[name] = (member.offset_data, member.size)
                elif member.issym():
                    self._links[name] = posixpath.join(posixpath.dirname(name), member.linkname)
                elif member.islnk():
                    self._links[name] = member.linkname

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def read(self, name: str) -> bytes:
        """A small file whole."""
        with self.at(name) as file:
            data = file.read(DOCUMENT_LIMIT + 1)
        if len(data) > DOCUMENT_LIMIT:
            raise StoreCorrupt(f"{name} in {self.path} is too large for a document", remedy=_REMEDY)
        return data

    def at(self, name: str) -> IO[bytes]:
        """A file's bytes. Raises StoreCorrupt if there is no such member."""
        name = posixpath.normpath(name)
        for _ in range(8):
            if name in self._places:
                return io.BufferedReader(Slice(self.path.open("rb"), *self._places[name]), CHUNK)
            name = posixpath.normpath(self._links.get(name, ""))
        raise StoreCorrupt(f"{self.path} lacks a member that its manifest lists", remedy=_REMEDY)

    def open(self, digest: str) -> IO[bytes]:
        """Content by digest, of an OCI layout in the archive."""
        return self.at(f"blobs/{digest.replace(':', '/', 1)}")


def is_layout(directory: Path) -> bool:
    """Whether a directory is an OCI layout."""
    return (directory / "oci-layout").is_file() and (directory / "index.json").is_file()


def open_layout(directory: Path, tag: str | None, digest: str | None, check: Callable[[], None]) -> Image:
    """The image of an OCI layout directory that tag and digest name, every digest verified.

    Raises:
        InvalidRequest: no layout, no such image, several, or another platform's.
        StoreCorrupt: a blob is missing or is not what its digest says.
    """
    if not is_layout(directory):
        raise InvalidRequest(f"{directory} is not an OCI layout", remedy="it has oci-layout and index.json")
    with host_faults(str(directory)):
        index = oci.parse_object((directory / "index.json").read_bytes(), f"{directory}/index.json")
        return _oci_image(LayoutBlobs(directory), index, tag, digest, check)


def open_archive(path: Path, tag: str | None, digest: str | None, check: Callable[[], None]) -> Image:
    """The image of a plain archive, Docker's format or OCI's.

    Raises:
        InvalidRequest, StoreCorrupt: as with `open_layout`.
    """
    with host_faults(str(path)):
        inside = ArchiveMembers(path)
        names = set(inside)
        if {"oci-layout", "index.json"} <= names:
            index = oci.parse_object(inside.read("index.json"), "index.json")
            return _oci_image(inside, index, tag, digest, check)
        if not is_archive(names):
            raise InvalidRequest(
                f"{path} is not a saved image: neither manifest.json nor index.json in it",
                remedy="a tarball of a root filesystem is given as rootfs:PATH",
            )
        return _docker_image(inside, tag, digest)


def _oci_image(
    blobs: oci.Blobs, index: Mapping[str, Any], tag: str | None, digest: str | None, check: Callable[[], None]
) -> Image:
    manifest = oci.find_manifest(blobs, index, tag, digest)
    config = oci.read_document(blobs, manifest.config)
    oci.check_platform(config)
    ids = oci.diff_ids(config, len(manifest.layers))
    for layer in manifest.layers:
        oci.verify(blobs, layer, check)
    layers = tuple(
        ImageLayer(layer.digest, _opener(blobs.open, layer.digest), diff_id, layer.size)
        for layer, diff_id in zip(manifest.layers, ids, strict=True)
    )
    return Image(manifest.config.digest, ImageConfig.from_image(config), layers)


def _opener(opens: Callable[[str], IO[bytes]], name: str) -> Callable[[], IO[bytes]]:
    return lambda: opens(name)


@dataclass(frozen=True)
class SavedEntry:
    """One image of `manifest.json` in an archive of Docker's format."""

    config: str
    tags: tuple[str, ...]
    layers: tuple[str, ...]


def saved_entries(data: bytes) -> tuple[SavedEntry, ...]:
    """Read `manifest.json`."""
    try:
        entries = json.loads(data)
        return tuple(
            SavedEntry(entry["Config"], tuple(entry.get("RepoTags") or ()), tuple(entry["Layers"]))
            for entry in entries
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreCorrupt(f"manifest.json is not what Docker writes: {error!r}", remedy=_REMEDY) from None


def choose_saved(entries: tuple[SavedEntry, ...], tag: str | None, digest: str | None) -> SavedEntry:
    """The image that is meant, by tag or by the digest of its configuration.

    Raises:
        InvalidRequest: none is, or several are.
    """
    wanted = [
        entry
        for entry in entries
        if (digest is None or _config_digest(entry) == digest)
        and (tag is None or any(tag in (name, name.rpartition(":")[2]) for name in entry.tags))
    ]
    if len(wanted) == 1:
        return wanted[0]
    tags = ", ".join(tag for entry in entries for tag in entry.tags) or "none"
    raise InvalidRequest(
        "several images in the archive" if wanted else f"no image {tag or digest or ''} in the archive",
        remedy=f"say which, as PATH:TAG; tags: {tags}",
    )


def _config_digest(entry: SavedEntry) -> str | None:
    match = _HEX_NAME.fullmatch(entry.config)
    return f"sha256:{match[1]}" if match else None


def _docker_image(inside: ArchiveMembers, tag: str | None, digest: str | None) -> Image:
    entry = choose_saved(saved_entries(inside.read("manifest.json")), tag, digest)
    data = inside.read(entry.config)
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if (promised := _config_digest(entry)) and promised != found:
        raise StoreCorrupt(f"{entry.config} has the digest {found}", remedy=_REMEDY)
    config = oci.parse_object(data, entry.config)
    oci.check_platform(config)
    ids = oci.diff_ids(config, len(entry.layers))
    layers = tuple(
        ImageLayer(name, _opener(inside.at, name), diff_id)
        for name, diff_id in zip(entry.layers, ids, strict=True)
    )
    return Image(found, ImageConfig.from_image(config), layers)


@contextmanager
def plain_file(path: Path, scratch: Path, limit_bytes: int, check: Callable[[], None]) -> Iterator[Path]:
    """The same file without compression: itself, or a copy in `scratch` while the block runs.

    Raises:
        InvalidRequest: it unpacks to more than `limit_bytes`.
    """
    with path.open("rb") as file:
        if compression_of(file.read(8)) == "plain":
            yield path
            return
        file.seek(0)
        copy = scratch / "archive.tar"
        try:
            with read_faults(str(path)), decompressed(file) as source, copy.open("wb") as target:
                _copy(source, target, limit_bytes, check)
            yield copy
        finally:
            copy.unlink(missing_ok=True)


def _copy(source: Readable, target: IO[bytes], limit_bytes: int, check: Callable[[], None]) -> None:
    total = 0
    while data := source.read(CHUNK):
        check()
        total += len(data)
        if total > limit_bytes:
            raise InvalidRequest(f"the archive unpacks to more than {limit_bytes >> 20} MiB")
        target.write(data)


def unpack_layer(layer: ImageLayer, plain: Readable, tree: Tree) -> None:
    """Unpack a layer's plain bytes over the tree and compare their digest.

    Raises:
        StoreCorrupt: they are not what the configuration promises.
    """
    passing = Hashing(plain)
    with tar_stream(passing) as tar:
        Unpacking(tree, whiteouts=True).run(tar)
    passing.drain()
    if passing.digest != layer.diff_id:
        raise StoreCorrupt(
            f"the layer {layer.name} unpacks to {passing.digest} instead of {layer.diff_id}", remedy=_REMEDY
        )
