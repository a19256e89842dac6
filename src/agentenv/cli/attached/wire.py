"""A client of a sandbox's agent: Connect calls with JSON over HTTP, on the standard library alone.

The protocol is https://connectrpc.com/docs/protocol; what the agent serves is in `guest/`. Nothing here is
shared between threads but `Stream.close`: a thread that calls has a `Line` of its own.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from agentenv.errors import (
    AenvError,
    CapacityExceeded,
    Conflict,
    Forbidden,
    GuestFault,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    Unauthorized,
)

AGENT_PORT = 49983
PING_S = 20  # how often a silent stream says that it is there
SILENCE_S = 75.0  # after which a stream that says nothing counts as broken
CALL_LIMIT_S = 60.0
_END_FLAG = 2

Message = dict[str, Any]

_BY_CODE: Mapping[str, type[AenvError]] = {
    "invalid_argument": InvalidRequest,
    "unauthenticated": Unauthorized,
    "permission_denied": Forbidden,
    "not_found": NotFound,
    "already_exists": Conflict,
    "failed_precondition": Conflict,
    "aborted": Conflict,
    "resource_exhausted": CapacityExceeded,
    "deadline_exceeded": OutcomeUnknown,
}

_BY_STATUS: Mapping[int, type[AenvError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    429: CapacityExceeded,
    503: CapacityExceeded,
}


class LineBroken(GuestFault):
    """The connection to the agent broke, or there was none: its sandbox paused, ended, or is out of reach."""


class DeadlinePassed(OutcomeUnknown):
    """The agent ended what was asked because its time was over."""


@dataclass(frozen=True)
class Agent:
    """Where a sandbox's agent is reached, and as whom.

    Args:
        url: of the node, with http or https.
        sandbox_id: whose agent it is.
        token: the sandbox's access token, where it has one.
        user: the account in the guest; the sandbox's default one if None.
        direct: the URL is the agent's own, without a node between (in tests).
    """

    url: str
    sandbox_id: str
    token: str | None = None
    user: str | None = None
    direct: bool = False
    _more: dict[str, str] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """What each request says of where it goes and who asks."""
        given = {"Connect-Protocol-Version": "1", "Accept-Encoding": "identity", **self._more}
        if not self.direct:
            given |= {"E2b-Sandbox-Id": self.sandbox_id, "E2b-Sandbox-Port": str(AGENT_PORT)}
        if self.token:
            given["X-Access-Token"] = self.token
        if self.user is not None:
            given["Authorization"] = "Basic " + b64encode(f"{self.user}:".encode()).decode()
        return given

    def line(self) -> Line:
        """A connection for calls, one after the other."""
        return Line(self)

    def stream(self, method: str, message: Message, *, lifetime_s: float | None = None) -> Stream:
        """Begin a call that is answered by a stream, such as `process.Process/Start`.

        Args:
            method: service and name.
            message: what is asked.
            lifetime_s: how long what is begun may last.

        Raises:
            LineBroken: there is no answer, or not the agent's.
        """
        headers = self.headers | {
            "Content-Type": "application/connect+json",
            "Keepalive-Ping-Interval": str(PING_S),
        }
        if lifetime_s is not None:
            headers["Connect-Timeout-Ms"] = str(max(1, int(lifetime_s * 1000)))
        payload = json.dumps(message).encode()
        body = b"\0%b%b" % (len(payload).to_bytes(4, "big"), payload)
        connection = self.connection(SILENCE_S)
        try:
            connection.request("POST", f"{self._path}/{method}", body, headers)
            way = connection.sock
            response = connection.getresponse()
            if response.status != 200:
                raise refusal(response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._broken(error) from error
        except BaseException:
            connection.close()
            raise
        return Stream(self, connection, way, response)

    def connection(self, limit_s: float) -> http.client.HTTPConnection:
        """A connection that is made when it is first used."""
        address = urlsplit(self.url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        return kind(address.hostname or "127.0.0.1", address.port, timeout=limit_s, blocksize=1 << 20)

    @property
    def _path(self) -> str:
        return urlsplit(self.url).path.rstrip("/")

    def _broken(self, error: Exception) -> LineBroken:
        return LineBroken(
            f"the connection to sandbox {self.sandbox_id} broke: {error or type(error).__name__}"
        )


class Line:
    """One connection to the agent for calls, made anew when it broke. Of one thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._connection = agent.connection(CALL_LIMIT_S)
        self._headers = agent.headers | {"Content-Type": "application/json"}

    def call(self, method: str, message: Message) -> Message:
        """Make a call that has one answer.

        Raises:
            LineBroken: whether it was done cannot be told.
            AenvError: the agent refused, in the class that fits.
        """
        path = f"{self._agent._path}/{method}"
        self._drop_ended()
        try:
            self._connection.request("POST", path, json.dumps(message).encode(), self._headers)
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise self._agent._broken(error) from error
        if response.status != 200:
            raise refusal(response.status, content)
        answer: Message = json.loads(content or b"{}")
        return answer

    def close(self) -> None:
        self._connection.close()

    def _drop_ended(self) -> None:
        """A connection that was ended since the last call, such as by a pause, is not tried again."""
        way = self._connection.sock
        if way is not None and select.select([way], [], [], 0)[0]:
            self._connection.close()


class Stream:
    """The messages that answer a call, to be iterated over once; it ends with the protocol's own end."""

    def __init__(
        self,
        agent: Agent,
        connection: http.client.HTTPConnection,
        way: socket.socket,
        response: http.client.HTTPResponse,
    ) -> None:
        self._agent = agent
        self._connection = connection
        self._way = way
        self._response = response

    def __iter__(self) -> Iterator[Message]:
        """The messages.

        Raises:
            LineBroken: it ended otherwise than by its end, or nothing came for too long.
            AenvError: the agent ended it with an error, in the class that fits.
        """
        try:
            while True:
                head = self._take(5)
                payload = json.loads(self._take(int.from_bytes(head[1:], "big")))
                if head[0] & _END_FLAG:
                    if fault := payload.get("error"):
                        raise _fault(fault.get("code", ""), fault.get("message", ""))
                    return
                yield payload
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # ValueError and AttributeError: another thread closed it in the midst of a read
            raise self._agent._broken(error) from error
        finally:
            self._connection.close()
            self._response.close()

    def close(self) -> None:
        """End it; a thread that reads from it finds it broken."""
        try:
            self._way.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def _take(self, size: int) -> bytes:
        data = self._response.read(size)
        if len(data) < size:
            raise http.client.IncompleteRead(data, size - len(data))
        return data


def refusal(status: int, content: bytes) -> AenvError:
    """The error that an answer other than 200 is, of the agent's or of the node's."""
    try:
        body = json.loads(content)
        code, message = body.get("code"), str(body.get("message", ""))
    except (ValueError, AttributeError):
        code, message = status, content[:200].decode(errors="replace")
    if isinstance(code, str):
        return _fault(code, message)
    if status in (408, 409, 410, 502, 504):  # the node's own: the sandbox does not run, or does not answer
        return LineBroken(message or f"the node answered {status}")
    by_status = {
        401: Unauthorized,
        403: Forbidden,
        404: NotFound,
        429: CapacityExceeded,
        503: CapacityExceeded,
    }
    return by_status.get(status, GuestFault)(message or f"the node answered {status}")


def _fault(code: str, message: str) -> AenvError:
    if code == "deadline_exceeded":
        return DeadlinePassed(message)
    return _BY_CODE.get(code, GuestFault)(message or code)
