"""Reads what the host's apt uses: mirrors, keyrings, proxy and certificates. All pure.

Formats: sources.list(5), both the one-line and the deb822 style; apt.conf(5) as `apt-config dump` prints it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class AptSource:
    """One archive of packages that the host's apt knows."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str | None = None


def parse_list(text: str) -> Iterator[AptSource]:
    """The binary archives of a `.list` file."""
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)((?:\s+[^\s#]+)*)", line)
        if match:
            options = dict(part.split("=", 1) for part in (match[1] or "").split() if "=" in part)
            yield AptSource(
                match[2].rstrip("/"), (match[3],), tuple(match[4].split()), options.get("signed-by")
            )


def parse_deb822(text: str) -> Iterator[AptSource]:
    """The binary archives of a `.sources` file that are enabled."""
    for stanza in re.split(r"\n[ \t]*\n", text):
        fields = _fields(stanza)
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in (
            "no",
            "false",
        ):
            continue
        key = fields.get("signed-by", "").strip()
        for uri in fields.get("uris", "").split():
            yield AptSource(
                uri.rstrip("/"),
                tuple(fields.get("suites", "").split()),
                tuple(fields.get("components", "").split()),
                key if key.startswith("/") else None,
            )


def _fields(stanza: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    name = ""
    for line in stanza.splitlines():
        if line.startswith("#"):
            continue
        if line[:1] in (" ", "\t"):
            fields[name] = f"{fields.get(name, '')} {line.strip()}"
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value.strip()
    return fields


# The settings that decide how the mirror is reached; the host's others (hooks, caches) stay there.
_KEPT = re.compile(
    r"Acquire::(https?(::.*)?|Retries|Check-Valid-Until|Check-Date|Max-ValidTime|ForceIPv[46]|Proxy.*)",
    re.IGNORECASE,
)


def acquire_options(dump: str) -> tuple[str, ...]:
    """Of `apt-config dump`, the lines that say how mirrors are reached, as apt.conf lines."""
    kept = []
    for line in dump.splitlines():
        key, _, value = line.partition(" ")
        if _KEPT.fullmatch(key) and value.strip() not in ('"";', ""):
            kept.append(line.strip())
    return tuple(kept)


@dataclass(frozen=True)
class Distribution:
    """Where a family of suites comes from when the host does not know a mirror of it."""

    name: str
    mirror: str
    security_mirror: str
    components: tuple[str, ...]
    keyrings: tuple[str, ...]
    suites: tuple[str, ...]


DEBIAN = Distribution(
    name="debian",
    mirror="http://deb.debian.org/debian",
    security_mirror="http://deb.debian.org/debian-security",
    components=("main",),
    keyrings=("/usr/share/keyrings/debian-archive-keyring.gpg",),
    suites=("bookworm", "trixie"),
)
UBUNTU = Distribution(
    name="ubuntu",
    mirror="http://archive.ubuntu.com/ubuntu",
    security_mirror="http://security.ubuntu.com/ubuntu",
    components=("main", "universe"),
    keyrings=("/usr/share/keyrings/ubuntu-archive-keyring.gpg",),
    suites=("noble",),
)


def distribution_of(suite: str) -> Distribution | None:
    """The distribution that has a suite, for the suites that are known to work."""
    return next((one for one in (DEBIAN, UBUNTU) if suite in one.suites), None)


def plan(suite: str, distribution: Distribution, known: Iterable[AptSource]) -> tuple[AptSource, ...]:
    """The archives to install a suite from: the release, its updates and its security fixes.

    The host's own mirror of that very suite is best; else its mirror of another suite of the same
    distribution, since a mirror carries them all; else the distribution's public one.
    """
    known = tuple(known)
    return tuple(
        AptSource(_mirror(wanted, distribution, known), (wanted,), distribution.components)
        for wanted in (suite, f"{suite}-updates", f"{suite}-security")
    )


def _mirror(wanted: str, distribution: Distribution, known: tuple[AptSource, ...]) -> str:
    security = wanted.endswith("-security")
    for source in known:
        if wanted in source.suites:
            return source.uri
    for source in known:
        if any(_same_kind(other, distribution, security) for other in source.suites):
            return source.uri
    return distribution.security_mirror if security else distribution.mirror


def _same_kind(suite: str, distribution: Distribution, security: bool) -> bool:
    base, _, pocket = suite.partition("-")
    return base in distribution.suites and (pocket == "security") == security and pocket != "backports"


def lines(sources: Iterable[AptSource], keyring: str | None = None) -> tuple[str, ...]:
    """The same in the one-line style; `keyring` is named where given."""
    option = f" [signed-by={keyring}]" if keyring else ""
    return tuple(f"deb{option} {s.uri} {' '.join(s.suites)} {' '.join(s.components)}" for s in sources)


def first_uri(mirror_list: str) -> str | None:
    """The first address of a mirror list, as `mirror+file:` sources name one."""
    for line in mirror_list.splitlines():
        word = line.split("#", 1)[0].split()
        if word:
            return word[0].rstrip("/")
    return None
