"""Heads as they are sent on, to the guest and to the client. No I/O.

To the guest: hop-by-hop fields go, and so do the traffic token and the `x-agentenv-*` routing pair,
which are none of its business; `E2b-Sandbox-*` stay; `X-Forwarded-For`, `-Host` and `-Proto` are
added. To the client: the guest's head as it is, but for hop-by-hop fields and the HTTP version.
Content-Length and Transfer-Encoding stay in both ways, because bodies are relayed as they are framed.
"""

from __future__ import annotations

from agentenv.proxy.head import AnswerHead, RequestHead


def request_to_guest(
    head: RequestHead,
    path: bytes,
    client: bytes,
    scheme: bytes,
    upgrade: bool,
    host: bytes | None = None,
) -> bytes:
    """The head to send to a guest.

    Args:
        head: the client's.
        path: the target to ask for, which may differ from the client's.
        client: the client's address.
        scheme: `http` or `https`, as the client spoke it.
        upgrade: pass on the wish to change the protocol.
        host: what the guest is told in the place of the host that the client asked for.
    """
    earlier = head.noted.get(b"x-forwarded-for")
    if upgrade and head.upgrade is not None:
        ending = b"Connection: Upgrade\r\nUpgrade: " + head.upgrade + b"\r\n"
    else:
        ending = b"" if head.minor == 1 else b"Connection: close\r\n"
    return (
        b"%b %b HTTP/1.%d\r\nHost: %b%b\r\n"
        b"X-Forwarded-For: %b\r\nX-Forwarded-Host: %b\r\nX-Forwarded-Proto: %b\r\n%b\r\n"
    ) % (
        head.method,
        path,
        head.minor,
        head.host if host is None else host,
        head.kept,
        client if earlier is None else earlier + b", " + client,
        head.host,
        scheme,
        ending,
    )


def request_to_api(head: RequestHead) -> bytes:
    """The head to hand to the API's protocol: as it came, without changes of protocol other than WebSocket.

    Its parser would take an upgrade it does not know for the end of HTTP on the connection.
    """
    if b"upgrade" not in head.noted or is_websocket(head):
        return head.raw + b"\r\n"
    lines = head.raw.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.lower().startswith(b"upgrade:")) + b"\r\n"


def is_websocket(head: RequestHead) -> bool:
    """Whether the request opens a WebSocket (RFC 6455, 4.1)."""
    return (
        head.method == b"GET"
        and (head.upgrade or b"").lower() == b"websocket"
        and b"transfer-encoding" not in head.noted
        and head.noted.get(b"content-length", b"0") == b"0"
    )


_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


def answer_to_client(head: AnswerHead, raw: bytes, close: bool) -> bytes:
    """The head to send to a client.

    Args:
        head: the guest's.
        raw: the same as it came, without its empty line.
        close: announce that the connection ends after this answer.
    """
    if head.minor == 1 and not close and head.noted.keys() <= _FRAMING:
        return raw + b"\r\n"
    ending = b""
    if head.status in (101, 426) and b"upgrade" in head.noted:
        ending = b"Connection: Upgrade\r\nUpgrade: " + head.noted[b"upgrade"] + b"\r\n"
    elif close:
        ending = b"Connection: close\r\n"
    return b"HTTP/1.1%b%b\r\n%b\r\n" % (head.start[8:], head.kept, ending)
