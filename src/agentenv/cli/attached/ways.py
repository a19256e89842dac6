"""The way to a port of a sandbox: a request to its node becomes a connection (docs/guides/operations.md)."""

from __future__ import annotations

import json
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from agentenv.cli.api import Unreachable
from agentenv.errors import (
    AenvError,
    Conflict,
    Forbidden,
    GuestFault,
    HostFault,
    NotFound,
    StoreFull,
    Unauthorized,
)

OPEN_LIMIT_S = 60.0
HEAD_END = b"\r\n\r\n"
_HEAD_MOST = 65536

_BY_STATUS: Mapping[int, type[AenvError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    502: GuestFault,
    507: StoreFull,
}


@dataclass(frozen=True)
class Way:
    """How a node connects to a sandbox's ports.

    Args:
        url: of the node.
        sandbox_id: whose ports.
        headers: that permit it.
    """

    url: str
    sandbox_id: str
    headers: Mapping[str, str]

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or (443 if self.tls else 80)

    @property
    def tls(self) -> ssl.SSLContext | None:
        """How the node is spoken to in secret, if it is."""
        return ssl.create_default_context() if urlsplit(self.url).scheme == "https" else None

    def request(self, port: int) -> bytes:
        """What the node is sent."""
        address = urlsplit(self.url)
        target = f"{address.path.rstrip('/')}/sandboxes/{self.sandbox_id}/forward?port={port}"
        fields = {"Host": address.netloc, "Connection": "Upgrade", "Upgrade": "tcp", **self.headers}
        lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def connect(self, port: int) -> socket.socket:
        """A connection to a port of the sandbox, which blocks.

        Raises:
            AenvError: the node refused, in the class that fits. Unreachable: it does not answer.
        """
        try:
            way = socket.create_connection((self.host, self.port), OPEN_LIMIT_S)
            try:
                tls = self.tls
                if tls is not None:
                    way = tls.wrap_socket(way, server_hostname=self.host)
                way.sendall(self.request(port))
                head = bytearray()
                while HEAD_END not in head and len(head) < _HEAD_MOST:  # what follows is not the head's
                    if not (byte := way.recv(1)):
                        break
                    head += byte
                if (size := refused(bytes(head))) is not None:
                    raise refusal(bytes(head), way.recv(size) if size else b"")
                way.settimeout(None)
                return way
            except BaseException:
                way.close()
                raise
        except OSError as error:
            raise Unreachable(f"the node at {self.url} does not answer: {error}") from error


def refused(head: bytes) -> int | None:
    """How long the body of a refusal is; None if the connection is there."""
    if head.split(b" ", 2)[1:2] == [b"101"]:
        return None
    match = re.search(rb"(?im)^content-length:\s*(\d+)", head)
    return min(int(match[1]), _HEAD_MOST) if match else 0


def refusal(head: bytes, body: bytes) -> AenvError:
    """The error that a refusal is."""
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        message = " ".join(words) or "the node ended the connection"
    return _BY_STATUS.get(status, HostFault)(message)
