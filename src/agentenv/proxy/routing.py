"""Which sandbox and port a request is for: a pure function of its head and the node's domain.

Order: the host `{port}-{sandbox}.{domain}`; else a pair of headers, at any other host; else a file
URL with a signature and no sandbox; else the wish to be connected to a port; else the request is the
API's.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import parse_qs, unquote_to_bytes

from agentenv.errors import InvalidRequest
from agentenv.proxy.head import HEADER_PAIRS, RequestHead

AGENT_PORT = 49983
INTERNAL_PATHS = frozenset(
    {b"init", b"forward", b"freeze", b"unfreeze", b"collapse", b"fsfreeze", b"fsthaw", b"upgrade"}
)

FORWARD_PROTOCOL = b"tcp"

_UNTOLD = (None, None)
_FORWARD = re.compile(rb"/sandboxes/([0-9A-Za-z_-]{1,128})/forward")
_LABEL = re.compile(rb"([0-9]+)-([0-9a-z][0-9a-z-]*)")
_SANDBOX = re.compile(rb"[\x21-\x7e]{1,128}")
_PORT = re.compile(rb"[0-9]{1,5}")
_ROUTING = tuple(name for pair in HEADER_PAIRS for name in pair)
# A path without any of these cannot be an internal one, however it is read.
_SUSPECT = re.compile(rb"init|forward|freeze|collapse|fsthaw|upgrade|%", re.IGNORECASE)
_OPERATIONS = {b"GET": "read", b"HEAD": "read", b"POST": "write"}


class Target(NamedTuple):
    """A port of a sandbox, and the path to ask for there.

    `e2b` is false when AgentENV's own headers named the sandbox: its clients expect other statuses
    for a sandbox that is paused. `raw` is the wish that the connection becomes one to the port, byte for
    byte; there is no path then.
    """

    sandbox_id: str
    port: int
    path: bytes
    e2b: bool
    raw: bool = False


class Signed(NamedTuple):
    """A file URL whose signature is all that tells the sandbox."""

    path: str
    operation: str
    username: str
    signature: str
    expiration: str | None
    target: bytes


def decide(head: RequestHead, domain: str) -> Target | Signed | None:
    """Where a request goes; None is the API.

    Args:
        head: the request.
        domain: the node's domain; a port in it does not count.

    Raises:
        InvalidRequest: it is for a sandbox, but the sandbox or the port is missing or cannot be.
    """
    named = _from_host(head.host, domain)
    if named is not None:
        return Target(*named, head.path, True)
    told = _from_headers(*map(head.noted.get, _ROUTING))
    if told is not None:
        sandbox_id, port, e2b = told
        return Target(sandbox_id, port, _without_proxy(head.path), e2b)
    if _under_proxy(head.path):
        raise InvalidRequest(
            "the request names no sandbox", remedy="send E2b-Sandbox-Id and E2b-Sandbox-Port"
        )
    if b"signature=" in head.path:
        return signed(head)
    return _to_forward(head) if b"/forward" in head.path else None


@lru_cache(maxsize=1024)
def _from_host(host: bytes, domain: str) -> tuple[str, int] | None:
    """Sandbox and port named by a host. Of the left label's parts after the port the first is the
    sandbox: E2B's older clients append the name of a cluster."""
    name = host.lower().partition(b":")[0].removesuffix(b".")
    suffix = b"." + domain.lower().partition(":")[0].removesuffix(".").encode()
    if not name.endswith(suffix):
        return None
    match = _LABEL.fullmatch(name[: -len(suffix)])
    if match is None:
        return None
    return match[2].partition(b"-")[0].decode(), _port(match[1])


@lru_cache(maxsize=1024)
def _from_headers(
    e2b_id: bytes | None, e2b_port: bytes | None, own_id: bytes | None, own_port: bytes | None
) -> tuple[str, int, bool] | None:
    """Sandbox and port named by headers, and whether E2B's named them; None when none did."""
    e2b, own = (e2b_id, e2b_port), (own_id, own_port)
    if e2b == own == _UNTOLD:
        return None
    if _UNTOLD not in (e2b, own) and e2b != own:
        raise InvalidRequest("the request's headers name two different sandboxes or ports")
    sandbox_id, port = own if e2b == _UNTOLD else e2b
    if sandbox_id is None or port is None:
        raise InvalidRequest(
            "the request names only one of sandbox and port",
            remedy="send both E2b-Sandbox-Id and E2b-Sandbox-Port",
        )
    if _SANDBOX.fullmatch(sandbox_id) is None:
        raise InvalidRequest("the header that names the sandbox is malformed")
    return sandbox_id.decode(), _port(port), e2b != _UNTOLD


def _without_proxy(path: bytes) -> bytes:
    if not _under_proxy(path):
        return path
    path = path[len(b"/proxy") :]
    return path if path[:1] == b"/" else b"/" + path


def _under_proxy(path: bytes) -> bool:
    return path.startswith(b"/proxy") and path[6:7] in (b"", b"/", b"?")


def _port(text: bytes) -> int:
    port = int(text) if _PORT.fullmatch(text) else 0
    if not 1 <= port <= 65535:
        raise InvalidRequest(f"{text[:16].decode('latin-1')!r} is no port", remedy="ports are 1 to 65535")
    return port


def signed(head: RequestHead) -> Signed | None:
    """The file URL that a request is for, if it has a signature.

    Raises:
        InvalidRequest: its query is malformed.
    """
    path, _, query = head.path.partition(b"?")
    if path != b"/files":
        return None
    method = head.method
    if method == b"OPTIONS":  # a browser asks first whether it may
        method = head.value(b"access-control-request-method")
    operation = _OPERATIONS.get(method)
    try:
        values = parse_qs(query.decode(), keep_blank_values=True, max_num_fields=32)
    except ValueError:
        raise InvalidRequest("the query of the file URL is malformed") from None
    if operation is None or "signature" not in values:
        return None
    expiration = values.get("signature_expiration", [None])[-1]
    username = values.get("username", [""])[-1]
    return Signed(
        values.get("path", [""])[-1], operation, username, values["signature"][-1], expiration, head.path
    )


def _to_forward(head: RequestHead) -> Target | None:
    """`GET /sandboxes/{id}/forward?port=N` with `Upgrade: tcp`."""
    path, _, query = head.path.partition(b"?")
    match = _FORWARD.fullmatch(path)
    if match is None:
        return None
    port = _port(query.removeprefix(b"port="))
    if head.method != b"GET" or (head.upgrade or b"").lower() != FORWARD_PROTOCOL:
        raise InvalidRequest("a port is forwarded by GET", remedy="send Connection: Upgrade and Upgrade: tcp")
    if port == AGENT_PORT:
        raise InvalidRequest(f"port {AGENT_PORT} is the agent's: it is reached by HTTP alone")
    return Target(match[1].decode(), port, b"", False, raw=True)


def is_internal(path: bytes) -> bool:
    """Whether a path, read in any way that a server might read it, is one of the agent's internal ones.

    Escapes are undone however often they were applied; empty and dot segments, parameters,
    backslashes, control characters and case do not count.
    """
    if _SUSPECT.search(path) is None:
        return False
    for _ in range(4):
        decoded = unquote_to_bytes(path)
        if decoded == path:
            break
        path = decoded
    path = re.split(rb"[?#]", path, maxsplit=1)[0].replace(b"\\", b"/")
    resolved: list[bytes] = []
    for segment in path.lower().split(b"/"):
        name = segment.partition(b";")[0].strip(bytes(range(0x21)) + b"\x7f")
        if name == b"..":
            del resolved[-1:]
        elif name not in (b"", b"."):
            resolved.append(name)
    return bool(resolved) and resolved[0] in INTERNAL_PATHS
