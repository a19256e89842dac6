"""What a client's connection and the exchange under way on it ask of each other."""

from __future__ import annotations

from typing import Protocol

from agentenv.proxy.answers import Payload
from agentenv.proxy.head import RequestHead


class Exchange(Protocol):
    """One request and its answer, on the side that answers."""

    def request_data(self, data: bytes, last: bool) -> None:
        """Bytes of the request's body as they are framed; `last` with the end of the body.

        A request without a body gets one call with no bytes.
        """

    def request_eof(self) -> bool:
        """The client sends no more, in the midst of a body; true keeps the way to it open."""

    def client_lost(self, error: Exception | None) -> None:
        """The client's connection is gone."""

    def abandon(self) -> bool:
        """The request turned out to be malformed: let go of it. True if nothing was sent in answer."""

    def client_full(self, full: bool) -> None:
        """The client reads slower than is written to it, or has caught up."""


class Client(Protocol):
    """A client's connection, as its exchange sees it."""

    stopping: bool

    @property
    def full(self) -> bool:
        """Whether more waits to be written than should."""

    def write(self, data: bytes) -> None:
        """Send to the client."""

    def write_eof(self) -> bool:
        """Send no more, and go on reading; false where that cannot be, as with TLS."""

    def hold_body(self, hold: bool) -> None:
        """Read no more of the request for now, or go on."""

    def finish(self, keep: bool) -> None:
        """Request and answer are complete; the connection goes on with the next request or ends."""

    def answer(self, head: RequestHead, payload: Payload) -> None:
        """Answer in place of the exchange, of whose answer nothing was sent; it is over."""

    def give_up_body(self) -> None:
        """The answer is complete and the rest of the request is not wanted; the exchange is over."""

    def tunnel(self) -> None:
        """From now on everything that the client sends is the exchange's, until it closes."""

    def reset(self) -> None:
        """Abort the connection so that the client cannot take it for a proper end."""
