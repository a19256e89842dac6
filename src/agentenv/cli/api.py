"""One request to a node's API, on the standard library alone, so that commands start at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentenv.errors import (
    AenvError,
    CapacityExceeded,
    Conflict,
    Expired,
    Forbidden,
    HostFault,
    InvalidRequest,
    NotFound,
    NotImplementedYet,
    StoreFull,
    Unauthorized,
)

if TYPE_CHECKING:
    from http.client import HTTPResponse

REQUEST_LIMIT_S = 60.0
BLOCK = 1 << 20  # bytes of a body that are sent at a time


class Unreachable(HostFault):
    """The node does not answer: it is not there, or the way to it is cut."""

    exit_code = 8


class TookTooLong(Unreachable):
    """What was asked is not answered in the time that it may take."""

    exit_code = 9


class Limited(AenvError):
    """A key has what it may have: its quota, or its requests per second."""

    status = 429
    code = "quota_exceeded"
    exit_code = 5


_BY_STATUS: Mapping[int, type[AenvError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    422: InvalidRequest,
    429: Limited,
    501: NotImplementedYet,
    503: CapacityExceeded,
    504: TookTooLong,
    507: StoreFull,
}

# Where a node, which does not know how it was found, says none.
_REMEDIES = {401: "see that the key is right and that server's own: `aenv auth show` says which are meant"}


@dataclass(frozen=True)
class Answer:
    """A node's answer; the names of `headers` are in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON; None when it is empty.

        Raises:
            HostFault: it is something else, so that what answers is hardly a node.
        """
        try:
            return json.loads(self.body) if self.body else None
        except ValueError:
            raise HostFault(f"the answer is not JSON: {self.body[:200]!r}", remedy="check the URL") from None

    def _told(self) -> tuple[str, str | None]:
        """What an error's body says, and what it says can be done."""
        try:
            body = json.loads(self.body)
            said, remedy = body.get("message"), body.get("remedy")
        except (ValueError, AttributeError):
            said = remedy = None
        if not isinstance(said, str) or not said:
            return self.body.decode(errors="replace")[:500], None
        if not isinstance(remedy, str) or not remedy:
            return said, None
        return said.removesuffix(f" ({remedy})"), remedy

    def fault(self, what: str) -> AenvError:
        """The error that this answer to `what` is."""
        said, remedy = self._told()
        said = said or f"{what}: {self.status}"
        if self.status >= 500 and (request := self.headers.get("x-request-id")):
            said += f" (request {request} in the node's log)"
        return fault_of(self.status, said, remedy)


def fault_of(status: int, said: str, remedy: str | None = None) -> AenvError:
    """The error that a node's status and words are."""
    return _BY_STATUS.get(status, HostFault)(said, remedy=remedy or _REMEDIES.get(status))


def download(
    url: str,
    out: IO[bytes],
    *,
    headers: Mapping[str, str] | None = None,
    limit_s: float = REQUEST_LIMIT_S,
    begun: Callable[[int], None] = lambda size: None,
    came: Callable[[int], None] = lambda size: None,
) -> Answer:
    """GET a body into a file as it comes; an answer other than 200 is returned with its body, as of `send`.

    Args:
        url: with http or https.
        out: where it goes.
        headers: of the request.
        limit_s: seconds that each step may take.
        begun: told how many bytes are to come, -1 where nobody knows.
        came: told of each part how many bytes it has.

    Raises:
        Unreachable: nothing answers there, or it broke off.
    """
    with _asked("GET", url, headers or {}, None, limit_s) as response:
        content = b""
        if response.status == 200:
            left = int(response.headers.get("Content-Length", -1))
            begun(left)
            while data := response.read(BLOCK):
                out.write(data)
                came(len(data))
                left -= len(data)
            if left > 0:
                from http.client import IncompleteRead

                raise IncompleteRead(b"", left)
        else:
            content = response.read()
        return _answer(response, content)


def send(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | IO[bytes] | None = None,
    limit_s: float = REQUEST_LIMIT_S,
) -> Answer:
    """Make a request and read the answer whole.

    Args:
        method: such as GET.
        url: with http or https.
        headers: a body that is a file needs its Content-Length here.
        body: bytes, or a file that is read to its end.
        limit_s: seconds that each step may take.

    Raises:
        Unreachable: nothing answers there. TookTooLong: it was asked, and does not answer.
    """
    with _asked(method, url, headers or {}, body, limit_s) as response:
        return _answer(response, response.read())


def _answer(response: HTTPResponse, content: bytes) -> Answer:
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, content)


@contextmanager
def _asked(
    method: str, url: str, headers: Mapping[str, str], body: bytes | IO[bytes] | None, limit_s: float
) -> Iterator[HTTPResponse]:
    """The answer to a request, to be read inside of the block."""
    import http.client  # takes 30 ms, which --help has no use for

    address = urlsplit(url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.hostname or "127.0.0.1", address.port, timeout=limit_s, blocksize=BLOCK)
    path = address.path + (f"?{address.query}" if address.query else "")
    origin = f"{address.scheme}://{address.netloc}"
    there = False
    try:
        connection.connect()
        there = True
        connection.request(method, path or "/", body=body, headers=dict(headers))
        yield connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        if there and isinstance(error, TimeoutError):
            raise TookTooLong(
                f"{method} {address.path}: the node at {origin} said nothing for {limit_s:.0f} s",
                remedy="what was asked may still be done: look, before it is asked again",
            ) from error
        raise Unreachable(
            f"the node at {origin} does not answer: {error or type(error).__name__}",
            remedy="see that it runs (aenv node status) and that the URL is right",
        ) from error
    finally:
        connection.close()
