"""Servers that a user knows by name: URL and key of each, in a file that nobody else can read."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentenv.errors import HostFault, InvalidRequest, NotFound

VARIABLE = "AENV_PROFILE"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Profile:
    """A server."""

    url: str
    api_key: str


@dataclass(frozen=True)
class Profiles:
    """All that are known, and which of them is used where none is named."""

    known: dict[str, Profile] = field(default_factory=dict)
    used: str | None = None

    def get(self, name: str) -> Profile:
        """The profile of that name, or raise NotFound."""
        if name not in self.known:
            have = ", ".join(sorted(self.known)) or "none"
            raise NotFound(f'there is no profile "{name}"', remedy=f"aenv auth login URL; there are: {have}")
        return self.known[name]

    def with_one(self, name: str, profile: Profile) -> Profiles:
        """These with one more, or one anew, which is used from now on."""
        return Profiles({**self.known, check_name(name): profile}, name)

    def using(self, name: str) -> Profiles:
        """These with another one used."""
        self.get(name)
        return replace(self, used=name)

    def without(self, name: str) -> Profiles:
        """These without one."""
        self.get(name)
        rest = {each: profile for each, profile in self.known.items() if each != name}
        return Profiles(rest, None if self.used == name else self.used)


def check_name(name: str) -> str:
    """The name, if it can be a profile's.

    Raises:
        InvalidRequest: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{name!r} cannot be a profile's name", remedy="letters, digits, . _ and -")
    return name


def path() -> Path:
    """Where they are kept (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "aenv" / "profiles.toml"


def load() -> Profiles:
    """The profiles of this user; none where there is no file.

    Raises:
        InvalidRequest: the file is not as `save` writes it. HostFault: it cannot be read.
    """
    try:
        text = path().read_text()
    except FileNotFoundError:
        return Profiles()
    except OSError as error:
        raise HostFault(f"{path()}: {error.strerror}") from error
    import tomllib  # here: most have no profiles, and commands start sooner

    try:
        document = tomllib.loads(text)
        known = {
            name: Profile(str(entry["url"]), str(entry["api_key"]))
            for name, entry in document.get("profiles", {}).items()
        }
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{path()} cannot be understood: {error}", remedy="mend or remove it") from None
    return Profiles(known, document.get("use"))


def save(profiles: Profiles) -> None:
    """Write them in the place of those before, in one step.

    Raises:
        HostFault: that cannot be.
    """
    lines = [] if profiles.used is None else [f"use = {json.dumps(profiles.used)}"]
    for name, profile in sorted(profiles.known.items()):
        lines += [
            f"\n[profiles.{json.dumps(name)}]",
            f"url = {json.dumps(profile.url)}",
            f"api_key = {json.dumps(profile.api_key)}",
        ]
    target = path()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write("\n".join(lines) + "\n")
        temporary.replace(target)
    except OSError as error:
        raise HostFault(f"{target}: {error.strerror}") from error
