"""What a registry wants with a 401: the `WWW-Authenticate` header (RFC 9110, 11.6.1). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit, urlunsplit

_TOKEN = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_SCHEME = re.compile(rf"\s*({_TOKEN})(?:\s+|$)")
_PARAMETER = re.compile(rf'\s*({_TOKEN})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|({_TOKEN}))\s*(?:,|$)')


@dataclass(frozen=True)
class Challenge:
    """One way to authenticate: `scheme` and parameter names in lowercase."""

    scheme: str
    parameters: Mapping[str, str]


def challenges(headers: Iterable[str]) -> tuple[Challenge, ...]:
    """All challenges in the headers; what cannot be read is left out."""
    found = []
    for header in headers:
        position = 0
        while match := _SCHEME.match(header, position):
            position = match.end()
            parameters: dict[str, str] = {}
            while pair := _PARAMETER.match(header, position):
                quoted = pair[2]
                parameters[pair[1].lower()] = re.sub(r"\\(.)", r"\1", quoted) if pair[3] is None else pair[3]
                position = pair.end()
            found.append(Challenge(match[1].lower(), parameters))
            comma = re.compile(r"\s*,\s*").match(header, position)
            position = comma.end() if comma else position
    return tuple(found)


def token_url(challenge: Challenge, repository: str) -> str | None:
    """Where a bearer token for pulling from the repository is got; None if the challenge names no place.

    Source: https://distribution.github.io/distribution/spec/auth/token/
    """
    realm = urlsplit(challenge.parameters.get("realm", ""))
    if realm.scheme not in ("http", "https") or not realm.netloc:
        return None
    query = {"scope": challenge.parameters.get("scope") or f"repository:{repository}:pull"}
    if service := challenge.parameters.get("service"):
        query = {"service": service, **query}
    joined = f"{realm.query}&{urlencode(query)}" if realm.query else urlencode(query)
    return urlunsplit(realm._replace(query=joined, fragment=""))
