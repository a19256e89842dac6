"""What the proxy answers by itself: bodies, and whole messages ready to be sent. No I/O.

The two 502 bodies are E2B's: its SDKs look for "was not found" and "port is not open".
"""

from __future__ import annotations

import html
import json
from http import HTTPStatus
from typing import Any

from agentenv.errors import AenvError
from agentenv.proxy.head import RequestHead

# A page at any origin may use a sandbox; without these a browser hides the error from its script.
_CORS = (
    b"access-control-allow-origin: *\r\n"
    b"access-control-allow-methods: *\r\n"
    b"access-control-allow-headers: *\r\n"
    b"access-control-expose-headers: *\r\n"
)

Payload = dict[str, Any]


def not_found(sandbox_id: str) -> Payload:
    """No such sandbox runs here."""
    return {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502}


def paused(sandbox_id: str) -> Payload:
    """The sandbox is paused and traffic does not wake it (AgentENV's clients; E2B's know no difference)."""
    return {"sandboxId": sandbox_id, "message": "The sandbox is paused", "code": 410}


def not_awake(sandbox_id: str) -> Payload:
    """The sandbox was to be woken and took longer than a request waits."""
    return {"sandboxId": sandbox_id, "message": "The sandbox did not wake in time", "code": 504}


def crowded(sandbox_id: str, limit: int) -> Payload:
    """As much is under way to the sandbox as may be. E2B's fields."""
    return {
        "sandboxId": sandbox_id,
        "message": f"The sandbox has too many requests under way (limit: {limit})",
        "code": 429,
        "connectionLimit": limit,
    }


def too_slow(sandbox_id: str, port: int) -> Payload:
    """The guest has not begun to answer in the time that it has, or nothing has moved for too long."""
    return {
        "sandboxId": sandbox_id,
        "message": "The sandbox did not answer in time",
        "port": port,
        "code": 504,
    }


def not_running(sandbox_id: str, *, paused: bool) -> Payload:
    """The same two with the statuses of the API, for who asks with its key."""
    if paused:
        return {"sandboxId": sandbox_id, "message": "The sandbox is paused", "code": 409}
    return {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 404}


def no_key() -> Payload:
    """The API's key is missing or another one."""
    return {"code": 401, "message": "the X-API-KEY header is missing or wrong"}


def stalled(sandbox_id: str) -> Payload:
    """The sandbox stands still for lack of space on the host. E2B's clients know the status."""
    return {
        "sandboxId": sandbox_id,
        "message": "The sandbox is stopped until the host has space for what it writes to its disk",
        "code": 507,
    }


def port_closed(sandbox_id: str, port: int) -> Payload:
    """The sandbox refuses connections to that port, or does not answer there."""
    return {
        "sandboxId": sandbox_id,
        "message": "The sandbox is running but port is not open",
        "port": port,
        "code": 502,
    }


def no_answer(sandbox_id: str, port: int, reason: str) -> Payload:
    """The request was handed to the guest, which gave no usable answer."""
    return {"sandboxId": sandbox_id, "message": reason, "port": port, "code": 502}


def traffic_refused(sandbox_id: str) -> Payload:
    """The sandbox is private and the token is missing or another one."""
    return {
        "sandboxId": sandbox_id,
        "message": "This sandbox is private: send its traffic access token in e2b-traffic-access-token",
        "code": 403,
    }


def wake_refused(sandbox_id: str) -> Payload:
    """The sandbox is paused, and the request lacks the access token that it takes to wake it."""
    return {
        "sandboxId": sandbox_id,
        "message": "The sandbox is paused: a request to its agent needs the access token to wake it",
        "code": 403,
    }


def internal_path() -> Payload:
    """A path of the agent that only the node may call."""
    return {"code": 404, "message": "not found"}


def bad_signature() -> Payload:
    """A file URL that no running sandbox has signed."""
    return {"code": 401, "message": "invalid signature"}


def of_error(error: AenvError) -> Payload:
    """The body for one of this project's errors."""
    return {"code": error.status, "message": str(error)}


def message(payload: Payload, head: RequestHead | None, *, close: bool) -> bytes:
    """A whole answer, whose status is the payload's `code`.

    Args:
        payload: the JSON object; shown as a page instead to a browser that navigates.
        head: the request, if it could be read.
        close: announce that the connection ends after it.
    """
    status = int(payload["code"])
    ending = b"connection: close\r\n" if close else b""
    if head is not None and is_preflight(head):
        return b"HTTP/1.1 204 No Content\r\n" + _CORS + ending + b"\r\n"
    if head is not None and _navigates(head):
        kind, body = b"text/html; charset=utf-8", _page(status, payload)
    else:
        kind, body = b"application/json; charset=utf-8", json.dumps(payload, separators=(",", ":")).encode()
    start = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
    fields = b"content-type: %b\r\ncontent-length: %d\r\ncache-control: no-store\r\n" % (kind, len(body))
    shown = b"" if head is not None and head.method == b"HEAD" else body
    return b"".join((start, fields, _CORS, ending, b"\r\n", shown))


def is_preflight(head: RequestHead) -> bool:
    """Whether a browser asks if it may send the real request; it hides the answer to a refused one."""
    return head.method == b"OPTIONS" and bool(head.value(b"access-control-request-method"))


def _navigates(head: RequestHead) -> bool:
    agent, accept = head.value(b"user-agent"), head.value(b"accept")
    return agent.startswith(b"Mozilla/") and b"text/html" in accept


def _page(status: int, payload: Payload) -> bytes:
    rows = "".join(
        f"<dt>{name}</dt><dd>{html.escape(str(payload[key]))}</dd>"
        for name, key in (("Sandbox", "sandboxId"), ("Port", "port"))
        if key in payload
    )
    title = f"{status} {HTTPStatus(status).phrase}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:16px/1.5 sans-serif;max-width:36em;margin:15vh auto;padding:0 1em}"
        "dt{color:#666}dd{margin:0 0 .5em;font-family:monospace}</style>"
        f"<h1>{title}</h1><p>{html.escape(str(payload['message']))}</p><dl>{rows}</dl></html>"
    ).encode()
