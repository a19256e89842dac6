"""How registries are reached from here: mirrors, which hosts may be spoken to in the clear, and by whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentenv.config import Settings
from agentenv.errors import InvalidRequest
from agentenv.image.reference import HUB, Reference

HUB_SERVER = "registry-1.docker.io"


@dataclass(frozen=True)
class Access:
    """The settings that matter here; a process that pulls for another gets them as JSON."""

    mirrors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    insecure: tuple[str, ...] = ()
    ca_file: Path | None = None
    docker_config: Path | None = None
    downloads: int = 3
    ecr_url: str | None = None

    @classmethod
    def of(cls, settings: Settings) -> Access:
        """Those of a node."""
        return cls(
            {host: tuple(mirrors) for host, mirrors in settings.registry_mirrors.items()},
            tuple(settings.insecure_registries),
            settings.ca_file,
            settings.docker_config,
            settings.image_downloads,
            settings.ecr_url,
        )

    def document(self) -> dict[str, Any]:
        """A JSON object from which `from_document` makes an equal value."""
        paths = {"ca_file": self.ca_file, "docker_config": self.docker_config}
        return {**asdict(self), **{name: str(path) if path else None for name, path in paths.items()}}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Access:
        """The inverse of `document`."""
        ca_file, docker_config = document["ca_file"], document["docker_config"]
        return cls(
            {host: tuple(mirrors) for host, mirrors in document["mirrors"].items()},
            tuple(document["insecure"]),
            Path(ca_file) if ca_file else None,
            Path(docker_config) if docker_config else None,
            document["downloads"],
            document["ecr_url"],
        )

    def allows(self, url: str) -> bool:
        """Whether a URL may be asked: with TLS any, in the clear only hosts that are listed."""
        parts = urlsplit(url)
        return parts.scheme == "https" or (parts.scheme == "http" and parts.netloc in self.insecure)


@dataclass(frozen=True)
class Endpoint:
    """A server that may have an image: `host` as in references and credentials, `url` without a path."""

    host: str
    url: str
    is_mirror: bool = False


def endpoints(reference: Reference, access: Access) -> tuple[Endpoint, ...]:
    """Where to ask for an image, in this order: its registry's mirrors, then the registry itself.

    Raises:
        InvalidRequest: a mirror in the settings is none.
    """
    mirrors = access.mirrors.get(reference.host, ())
    return (
        *(_endpoint(host, access, is_mirror=True) for host in mirrors),
        _endpoint(reference.host, access, is_mirror=False),
    )


def _endpoint(host: str, access: Access, *, is_mirror: bool) -> Endpoint:
    server = HUB_SERVER if host == HUB else host
    scheme = "http" if server in access.insecure else "https"
    if not server or "/" in server:
        raise InvalidRequest(
            f"settings: {host!r} is not the host of a registry", remedy="HOST or HOST:PORT, without a scheme"
        )
    return Endpoint(host, f"{scheme}://{server}", is_mirror)
