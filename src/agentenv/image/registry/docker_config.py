"""Credentials as `docker login` left them: `config.json`, and the credential helpers that it names.

Formats: https://docs.docker.com/reference/cli/docker/login/ and
https://github.com/docker/docker-credential-helpers.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.errors import HostFault, InvalidRequest
from agentenv.image.credentials import Credentials
from agentenv.image.reference import HUB

HUB_KEY = "https://index.docker.io/v1/"
HELPER_LIMIT_S = 30.0
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TOKEN_USER = "<token>"  # a helper's way to say that the secret is an identity token


@dataclass(frozen=True)
class Login:
    """What is known for a registry: credentials, or an identity token that is exchanged for others."""

    credentials: Credentials | None = None
    identity_token: str = field(default="", repr=False)


def read(directory: Path | None) -> Mapping[str, Any]:
    """The configuration in Docker's directory; empty if there is none.

    Raises:
        InvalidRequest: it cannot be read.
    """
    if directory is None:
        return {}
    path = directory / "config.json"
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise InvalidRequest(f"{path} cannot be read: {why}", remedy="mend it, or docker login") from None
    return document if isinstance(document, dict) else {}


def keys(host: str) -> tuple[str, ...]:
    """The names under which a registry may stand in the configuration."""
    if host == HUB:
        return (HUB_KEY, "index.docker.io", "docker.io", "https://index.docker.io/v1", "registry-1.docker.io")
    return host, f"https://{host}", f"https://{host}/", f"https://{host}/v1/", f"https://{host}/v2/"


def helper(config: Mapping[str, Any], host: str) -> tuple[str, str] | None:
    """The credential helper for a registry, and the name by which to ask it.

    Raises:
        InvalidRequest: it has a name that no program can have.
    """
    for key in keys(host):
        name = _mapping(config.get("credHelpers")).get(key)
        if name:
            return _checked(name), key
    store = config.get("credsStore")
    return (_checked(store), keys(host)[0]) if store else None


def _checked(name: object) -> str:
    if not isinstance(name, str) or not _HELPER.fullmatch(name):
        raise InvalidRequest(f"{name!r} in Docker's config.json is no credential helper's name")
    return name


def stored(config: Mapping[str, Any], host: str) -> Login | None:
    """What the configuration itself has for a registry."""
    auths = _mapping(config.get("auths"))
    for key in keys(host):
        if entry := _mapping(auths.get(key)):
            if token := entry.get("registrytoken"):
                return Login(Credentials(token=str(token)))
            username, password = _decoded(entry.get("auth"))
            username, password = (
                str(entry.get("username") or username),
                str(entry.get("password") or password),
            )
            identity = str(entry.get("identitytoken") or "")
            if username or identity:
                return Login(Credentials(username, password), identity)
    return None


def _decoded(auth: object) -> tuple[str, str]:
    try:
        text = base64.b64decode(str(auth or ""), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return "", ""
    username, _, password = text.partition(":")
    return username, password.rstrip("\0")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


async def login(directory: Path | None, host: str) -> Login | None:
    """What is known for a registry, asking its helper if it has one; None if nothing is.

    Raises:
        InvalidRequest: the configuration cannot be read. HostFault: the helper fails.
    """
    config = read(directory)
    if found := helper(config, host):
        answer = await _ask(*found)
        if answer is not None:
            return answer
    return stored(config, host)


async def _ask(name: str, server: str) -> Login | None:
    program = f"docker-credential-{name}"
    try:
        process = await asyncio.create_subprocess_exec(
            program, "get", stdin=PIPE, stdout=PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        raise HostFault(f"the credential helper {program} cannot be run: {error.strerror}") from None
    try:
        output, _ = await asyncio.wait_for(process.communicate(server.encode()), HELPER_LIMIT_S)
    except TimeoutError:
        raise HostFault(f"{program} did not answer within {HELPER_LIMIT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        if b"not found" in output:  # its way to say that it has none for this registry
            return None
        raise HostFault(f"{program} failed ({process.returncode}) for {server}", remedy="run it by hand")
    try:
        answer = json.loads(output)
        username, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError):
        raise HostFault(f"{program} answered with something else than credentials") from None
    if username == _TOKEN_USER:
        return Login(None, secret)
    return Login(Credentials(username, secret)) if username else None
