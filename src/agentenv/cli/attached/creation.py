"""A new sandbox, as it is asked for on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import IO, Any

from agentenv.cli.server import Node
from agentenv.errors import InvalidRequest

CREATE_LIMIT_S = 1800.0  # an image may have to be pulled and booted
EVERYTHING = "0.0.0.0/0"


def create(node: Node, **asked: Any) -> str:
    """Make it; its id. The words are those of `request`."""
    path, body = request(**asked)
    return str(node.call("POST", path, body, limit_s=CREATE_LIMIT_S)["sandboxID"])


def request(
    *,
    template: str | None = None,
    image: str | None = None,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: int | None = None,
    cpu: int | None = None,
    memory: int | None = None,
    disk: int | None = None,
    drives: Sequence[str] = (),
    no_internet: bool = False,
    allow: Sequence[str] = (),
    deny: Sequence[str] = (),
    network: IO[str] | None = None,
    private: bool = False,
    secure: bool = True,
) -> tuple[str, dict[str, Any]]:
    """The call's path and body. Sizes are in MiB, times in seconds.

    Raises:
        InvalidRequest: something cannot be meant.
    """
    body: dict[str, Any] = {
        "timeout": timeout or 300,
        "metadata": {**(metadata or {}), **({"name": name} if name else {})},
        "envVars": dict(env or {}),
        "cpuCount": cpu,
        "memoryMB": memory,
        "diskSizeMB": disk,
        "attachedDrives": [_drive(number, text) for number, text in enumerate(drives)],
        "network": _network(allow, deny, network, private=private),
        "allow_internet_access": False if no_internet else None,
    }
    body = {key: value for key, value in body.items() if value not in (None, {}, [])}
    if image is not None:
        return "/sandboxes-cold", {"image": image, "secure": secure, **body}
    if secure:
        return "/v2/sandboxes", {"templateID": template, **body}
    return "/sandboxes", {"templateID": template, "secure": False, **body}


def _network(
    allow: Sequence[str], deny: Sequence[str], given: IO[str] | None, *, private: bool
) -> dict[str, Any]:
    network = document(given, "--network") if given is not None else {}
    add_rules(network, allow, deny)
    if private:
        network["allowPublicTraffic"] = False
    return network


def add_rules(network: dict[str, Any], allow: Sequence[str], deny: Sequence[str]) -> None:
    """Add what `--allow` and `--deny` mean to a `network` of the API; what is allowed is reached alone."""
    if allow:  # alone it would restrict nothing
        network["allowOut"] = [*network.get("allowOut", []), *allow]
        deny = deny or ([] if network.get("denyOut") else [EVERYTHING])
    if deny:
        network["denyOut"] = [*network.get("denyOut", []), *deny]


def document(given: IO[str], option: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        found = json.load(given)
    except ValueError as error:
        raise InvalidRequest(f"{option}: {given.name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{option}: {given.name} holds no object")
    return found


def _drive(number: int, text: str) -> dict[str, Any]:
    """IMAGE[:PATH][:rw]; the image's name may have colons itself, and a path begins with a slash."""
    rest, _, last = text.rpartition(":")
    writable = last == "rw"
    image = rest if last in ("rw", "ro") else text
    path = None
    if ":/" in image and "://" not in image:
        image, _, path = image.rpartition(":/")
        path = f"/{path}"
    if not image:
        raise InvalidRequest(f"--drive {text!r} names no image", remedy="IMAGE[:PATH][:rw]")
    drive: dict[str, Any] = {"id": f"drive{number}", "image": image, "readOnly": not writable}
    if path is not None:
        drive["mountPath"] = path
    return drive
