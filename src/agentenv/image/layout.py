"""An OCI archive: a tar file of an OCI image layout, here of one image with one plain layer.

Format: https://github.com/opencontainers/image-spec/blob/main/image-layout.md. A file's name in it is its
digest, so the layer has to be there whole before the archive can begin.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentenv.image.config import ImageConfig

_BLOCK = tarfile.BLOCKSIZE
_INDEX = "application/vnd.oci.image.index.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_REF_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True)
class Frame:
    """What stands before and after the layer's bytes in the archive."""

    head: bytes
    tail: bytes


def frame(config: ImageConfig, layer_digest: str, layer_size: int, *, created: str, name: str) -> Frame:
    """The archive around a layer.

    Args:
        config: how the image is run.
        layer_digest: `sha256:HEX` of the layer, a plain tar file.
        layer_size: its bytes.
        created: when the image was made (RFC 3339).
        name: its tag in the layout.
    """
    document = _json(_image(config, layer_digest, created))
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, document),
            "layers": [{"mediaType": _LAYER, "digest": layer_digest, "size": layer_size}],
        }
    )
    listed = {**_descriptor(_MANIFEST, manifest), "annotations": {_REF_NAME: name}}
    index = _json({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [listed]})
    head = b"".join(
        (
            _file("oci-layout", _json({"imageLayoutVersion": "1.0.0"})),
            _file("index.json", index),
            _blob(manifest),
            _blob(document),
            _header(f"blobs/sha256/{layer_digest.removeprefix('sha256:')}", layer_size),
        )
    )
    return Frame(head, bytes(-layer_size % _BLOCK) + bytes(2 * _BLOCK))


def _image(config: ImageConfig, diff_id: str, created: str) -> dict[str, Any]:
    return {
        "created": created,
        "architecture": "amd64",
        "os": "linux",
        "config": config.image_document(),
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        "history": [{"created": created, "created_by": "aenv template export"}],
    }


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _descriptor(kind: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(data), "size": len(data)}


def _blob(data: bytes) -> bytes:
    return _file(f"blobs/sha256/{hashlib.sha256(data).hexdigest()}", data)


def _file(name: str, data: bytes) -> bytes:
    return _header(name, len(data)) + data + bytes(-len(data) % _BLOCK)


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.PAX_FORMAT)
