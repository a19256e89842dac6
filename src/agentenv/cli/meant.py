"""Which server is meant: from options, variables, what `aenv auth` knows, and the node of this machine.

A key belongs to a server, and is never sent to another one: the source that says which server also says
which key, unless a key is given on the same level.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentenv.cli import profiles
from agentenv.errors import Conflict, NotFound, Unauthorized

if TYPE_CHECKING:
    from agentenv.cli.profiles import Profile
    from agentenv.cli.server import Node

LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})


def node_address(url: str | None, api_key: str | None, home: Path | None) -> tuple[str, str]:
    """URL and key of the node that is meant. The first of these says which:

    1. `--url`, with `--api-key` or E2B_API_KEY; else the key of the profile with that URL, or of the local
       node if it is that.
    2. `--profile`, with its key unless `--api-key` says another one.
    3. `--home`: the local node on it.
    4. AENV_PROFILE, like `--profile`.
    5. E2B_API_URL, like `--url`.
    6. The profile in use, like `--profile`.
    7. The local node, with `--api-key` or E2B_API_KEY or its own key.

    Raises:
        NotFound: there is no such profile. Conflict: no node runs here. Unauthorized: no key of that server
            is known, or its file is not readable.
    """
    found = _elsewhere(url, api_key, home)
    if found is not None:
        return found
    return _local(home, _typed_key(api_key) if _typed("home") else api_key)


def remote(url: str | None, api_key: str | None, home: Path | None) -> Node | None:
    """The server that an option, a variable or a profile names; None where none does, and it is the data
    directory here that is meant, whether its node runs or not."""
    from agentenv.cli.server import Node

    found = _elsewhere(url, api_key, home)
    return Node(*found) if found is not None else None


def _elsewhere(url: str | None, api_key: str | None, home: Path | None) -> tuple[str, str] | None:
    context = click.get_current_context(silent=True)
    named = context.meta.get(profiles.VARIABLE) if context is not None else None
    if url is not None and _typed("url"):
        return url, api_key or _known_key(url, home)
    if named and _typed("profile"):
        return _of(profiles.load().get(named), api_key)
    if home is not None and _typed("home"):
        return None
    if named:
        return _of(profiles.load().get(named), api_key)
    if url is not None:
        return url, api_key or _known_key(url, home)
    known = profiles.load()
    return _of(known.get(known.used), api_key) if known.used else None


def _typed_key(api_key: str | None) -> str | None:
    return api_key if _typed("api_key") else None


def _typed(name: str) -> bool:
    """Whether a value was given on the command line, and not by a variable."""
    context = click.get_current_context(silent=True)
    if context is None:
        return True
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _of(profile: Profile, api_key: str | None) -> tuple[str, str]:
    return profile.url, _typed_key(api_key) or profile.api_key


def _local(home: Path | None, api_key: str | None) -> tuple[str, str]:
    from agentenv.cli.env import variables

    try:
        from agentenv import config
    except ModuleNotFoundError as error:  # a client's installation, which lacks what a node needs
        raise Conflict(
            "no server is known, and what a node needs is not installed here",
            remedy="aenv auth login URL, or set E2B_API_URL and E2B_API_KEY",
        ) from error
    found = variables(config.load(home=home))
    return found["E2B_API_URL"], api_key or found["E2B_API_KEY"]


def _known_key(url: str, home: Path | None) -> str:
    for profile in profiles.load().known.values():
        if profile.url == url.rstrip("/"):
            return profile.api_key
    try:
        there, key = _local(home, None)
    except (Conflict, NotFound, Unauthorized):  # of a node here nothing can be had
        there, key = "", ""
    if there and _same(url, there):
        return key
    raise Unauthorized(
        f"no API key of {url} is known", remedy=f"give --api-key, set E2B_API_KEY, or: aenv auth login {url}"
    )


def _same(one: str, other: str) -> bool:
    """Whether two URLs are of the same server: this machine has several names."""
    from urllib.parse import urlsplit

    first, second = urlsplit(one), urlsplit(other)
    names = {first.hostname, second.hostname}
    return (first.scheme, first.port) == (second.scheme, second.port) and (
        len(names) == 1 or names <= LOCAL_NAMES
    )
