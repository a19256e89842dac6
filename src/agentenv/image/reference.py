"""References to images in registries: `[HOST[:PORT]/]NAME[:TAG][@DIGEST]`.

Grammar: https://github.com/distribution/reference. As everywhere, the first part is a host if it has a dot
or a port or is `localhost`, no host means Docker Hub, and one word there means `library/WORD`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentenv.errors import InvalidRequest

HUB = "docker.io"
_HUB_NAMES = ("docker.io", "index.docker.io", "registry-1.docker.io", "registry.hub.docker.com")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
LENGTH_MAX = 255  # of a repository's name, with its host


@dataclass(frozen=True)
class Reference:
    """An image in a registry. With a digest, the tag is for people."""

    host: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def wanted(self) -> str:
        """What the registry is asked for: the digest, or else the tag."""
        return self.digest or self.tag or "latest"

    @property
    def name(self) -> str:
        """The repository with its host."""
        return f"{self.host}/{self.repository}"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.name}{tag}{'@' + self.digest if self.digest else ''}"


def parse(text: str) -> Reference:
    """The reference in its whole form.

    Raises:
        InvalidRequest: it is none; says which part cannot be.
    """
    rest, digest = _cut(text, "@")
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise _invalid(text, f"the digest {digest!r} is not sha256: and 64 hexadecimal digits")
    host, rest = _host(rest)
    repository, tag = _cut(rest, ":")
    if tag is not None and not _TAG.fullmatch(tag):
        raise _invalid(text, f"the tag {tag!r} cannot be one")
    if not _HOST.fullmatch(host):
        raise _invalid(text, f"the host {host!r} cannot be one")
    if not _REPOSITORY.fullmatch(repository):
        raise _invalid(text, f"the name {repository!r} is not lowercase letters, digits, and . _ - / between")
    if len(host) + len(repository) >= LENGTH_MAX:
        raise _invalid(text, "the name is too long")
    if host == HUB and "/" not in repository:
        repository = f"library/{repository}"
    return Reference(host, repository, tag if tag or digest else "latest", digest)


def _cut(text: str, separator: str) -> tuple[str, str | None]:
    head, found, tail = text.partition(separator)
    return head, tail if found else None


def _host(text: str) -> tuple[str, str]:
    first, slash, rest = text.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return (HUB if first in _HUB_NAMES else first), rest
    return HUB, text


def _invalid(text: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{text!r} is not an image's name: {why}", remedy="such as ghcr.io/owner/name:tag")
