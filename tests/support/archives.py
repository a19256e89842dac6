"""Archives and OCI layouts made in memory, down to the header fields that tools never write."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MTIME = 1_600_000_000


@dataclass
class Item:
    """One member of a tarball."""

    name: str
    kind: bytes = tarfile.REGTYPE
    data: bytes = b""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    link: str = ""
    mtime: float = MTIME
    device: tuple[int, int] = (0, 0)
    pax: dict[str, str] = field(default_factory=dict)


def file(name: str, data: bytes = b"", **fields: Any) -> Item:
    return Item(name, data=data, **fields)


def directory(name: str, **fields: Any) -> Item:
    return Item(name, tarfile.DIRTYPE, **{"mode": 0o755, **fields})


def symlink(name: str, target: str, **fields: Any) -> Item:
    return Item(name, tarfile.SYMTYPE, link=target, **{"mode": 0o777, **fields})


def hardlink(name: str, target: str) -> Item:
    return Item(name, tarfile.LNKTYPE, link=target)


def tarball(*items: Item) -> bytes:
    """The items as a plain tarball."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for item in items:
            info = tarfile.TarInfo(item.name)
            info.type, info.mode, info.uid, info.gid = item.kind, item.mode, item.uid, item.gid
            info.linkname, info.mtime, info.size = item.link, item.mtime, len(item.data)
            info.devmajor, info.devminor = item.device
            info.pax_headers = item.pax
            tar.addfile(info, io.BytesIO(item.data))
    return buffer.getvalue()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def plain(data: bytes) -> bytes:
    return data


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def zstandard(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-cq"], input=data, stdout=subprocess.PIPE, check=True).stdout


MEDIA: dict[Callable[[bytes], bytes], str] = {
    plain: "application/vnd.oci.image.layer.v1.tar",
    gzipped: "application/vnd.oci.image.layer.v1.tar+gzip",
    zstandard: "application/vnd.oci.image.layer.v1.tar+zstd",
}


MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_TYPES = {
    MANIFEST: "application/vnd.docker.distribution.manifest.v2+json",
    INDEX: "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.config.v1+json": "application/vnd.docker.container.image.v1+json",
    MEDIA[gzipped]: "application/vnd.docker.image.rootfs.diff.tar.gzip",
}


class Layout:
    """An OCI layout directory being written; with `docker`, its parts have Docker's media types."""

    def __init__(self, directory: Path, *, docker: bool = False) -> None:
        self.directory = directory
        self._types = DOCKER_TYPES if docker else {}
        (directory / "blobs/sha256").mkdir(parents=True)
        (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.entries: list[dict[str, Any]] = []

    def blob(self, data: bytes, media_type: str, **fields: Any) -> dict[str, Any]:
        """Store a blob; returns its descriptor."""
        digest = digest_of(data)
        media_type = self._types.get(media_type, media_type)
        (self.directory / "blobs" / digest.replace(":", "/")).write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data), **fields}

    def document(self, value: dict[str, Any], media_type: str, **fields: Any) -> dict[str, Any]:
        return self.blob(json.dumps(value).encode(), media_type, **fields)

    def image(
        self,
        layers: Sequence[bytes],
        *,
        tag: str | None = "latest",
        config: dict[str, Any] | None = None,
        architecture: str = "amd64",
        packed: Callable[[bytes], bytes] = gzipped,
        platform: dict[str, str] | None = None,
        listed: bool = True,
    ) -> dict[str, Any]:
        """Add an image of plain layer tarballs; returns the descriptor of its manifest."""
        document = {
            "architecture": architecture,
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": self._types.get(MANIFEST, MANIFEST),
            "config": self.document(document, "application/vnd.oci.image.config.v1+json"),
            "layers": [self.blob(packed(layer), MEDIA.get(packed, MEDIA[gzipped])) for layer in layers],
        }
        extra: dict[str, Any] = {"platform": platform} if platform else {}
        if tag is not None:
            extra["annotations"] = {"org.opencontainers.image.ref.name": tag}
        entry = self.document(manifest, MANIFEST, **extra)
        if listed:
            self.entries.append(entry)
        self.write()
        return entry

    def index(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Add an index of images; returns its descriptor."""
        document = {"schemaVersion": 2, "mediaType": self._types.get(INDEX, INDEX), "manifests": entries}
        return self.document(document, INDEX)

    def read(self, entry: dict[str, Any]) -> bytes:
        """The content that a descriptor names."""
        return (self.directory / "blobs" / str(entry["digest"]).replace(":", "/")).read_bytes()

    def config_digest(self, entry: dict[str, Any]) -> str:
        """The digest of the configuration of an image, by its manifest's descriptor."""
        return str(json.loads(self.read(entry))["config"]["digest"])

    def write(self) -> None:
        """Write index.json."""
        (self.directory / "index.json").write_text(
            json.dumps({"schemaVersion": 2, "manifests": self.entries})
        )
