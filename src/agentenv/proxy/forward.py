"""Heads as they are sent on, to the guest and to the client. No I/O.

To the guest: hop-by-hop fields go, and so do the traffic token and the `x-agentenv-*` routing pair,
which are none of its business; `E2b-Sandbox-*` stay; `X-Forwarded-For`, `-Host` and `-Proto` are
added. To the client: the guest's head as it is, but for hop-by-hop fields and the HTTP version.
Content-Length and Transfer-Encoding stay in both ways, because bodies are relayed as they are framed.
"""

from __future__ import annotations

from agentenv.proxy.head import TRAFFIC_TOKEN, AnswerHead, RequestHead

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"upgrade",
    }
)
_NOT_FOR_GUESTS = _HOP_BY_HOP | {
    TRAFFIC_TOKEN,
    b"x-agentenv-sandbox-id",
    b"x-agentenv-target-port",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
    b"host",
}
# What a client cannot have taken out by naming it in Connection: a body would lose its end.
_FRAMING = frozenset({b"host", b"content-length", b"transfer-encoding"})
_HOPS_OF_ANSWERS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"upgrade"})


def request_to_guest(head: RequestHead, path: bytes, client: bytes, scheme: bytes, upgrade: bool) -> bytes:
    """The head to send to a guest.

    Args:
        head: the client's.
        path: the target to ask for, which may differ from the client's.
        client: the client's address.
        scheme: `http` or `https`, as the client spoke it.
        upgrade: pass on the wish to change the protocol.
    """
    dropped = _NOT_FOR_GUESTS if not head.options else _NOT_FOR_GUESTS | (head.options - _FRAMING)
    earlier = head.noted.get(b"x-forwarded-for")
    lines = [
        b"%b %b HTTP/1.%d" % (head.method, path, head.minor),
        b"Host: " + head.host,
        *[line for name, line in head.fields if name not in dropped],
        b"X-Forwarded-For: " + (client if earlier is None else earlier + b", " + client),
        b"X-Forwarded-Host: " + head.host,
        b"X-Forwarded-Proto: " + scheme,
    ]
    if upgrade and head.upgrade is not None:
        lines.append(b"Connection: Upgrade\r\nUpgrade: " + head.upgrade)
    elif head.minor == 0:
        lines.append(b"Connection: close")
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def request_to_api(head: RequestHead, raw: bytes) -> bytes:
    """The head to hand to the API's protocol: as it came, without changes of protocol other than WebSocket.

    Its parser would take an upgrade it does not know for the end of HTTP on the connection.
    """
    if b"upgrade" not in head.noted or is_websocket(head):
        return raw + b"\r\n"
    start = raw[: raw.index(b"\r\n")]
    return b"\r\n".join([start, *[line for name, line in head.fields if name != b"upgrade"], b"\r\n"])


def is_websocket(head: RequestHead) -> bool:
    """Whether the request opens a WebSocket (RFC 6455, 4.1)."""
    return (
        head.method == b"GET"
        and (head.upgrade or b"").lower() == b"websocket"
        and b"transfer-encoding" not in head.noted
        and head.noted.get(b"content-length", b"0") == b"0"
    )


def answer_to_client(head: AnswerHead, raw: bytes, close: bool) -> bytes:
    """The head to send to a client.

    Args:
        head: the guest's.
        raw: the same as it came, without its empty line.
        close: announce that the connection ends after this answer.
    """
    if head.minor == 1 and not close and _HOPS_OF_ANSWERS.isdisjoint(head.noted):
        return raw + b"\r\n"
    dropped = _HOP_BY_HOP | (head.options - _FRAMING)
    lines = [b"HTTP/1.1" + head.start[8:]]
    lines += [line for name, line in head.fields if name not in dropped]
    if head.status in (101, 426) and b"upgrade" in head.noted:
        lines.append(b"Connection: Upgrade\r\nUpgrade: " + head.noted[b"upgrade"])
    elif close:
        lines.append(b"Connection: close")
    lines.append(b"\r\n")
    return b"\r\n".join(lines)
