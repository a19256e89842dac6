"""A node's API, as what is attached to its sandboxes needs it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from agentenv.cli.api import Answer, Unreachable, send

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from agentenv.client.calls import Call

CALL_LIMIT_S = 60.0


class Node:
    """A node by its URL and key."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url.rstrip("/")
        self.headers = {"X-API-KEY": api_key}

    def call(self, method: str, path: str, body: Any = None, *, limit_s: float = CALL_LIMIT_S) -> Any:
        """What it answers; the error that its refusal is."""
        return self.ask(method, path, body, limit_s=limit_s).json()

    def do(self, call: Call[Any], *, limit_s: float = CALL_LIMIT_S) -> Any:
        """What it answers to a call of the Python client's, as it is."""
        return self.ask(call.method, call.path, call.body, headers=call.headers, limit_s=limit_s).json()

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        limit_s: float = CALL_LIMIT_S,
        refused: tuple[int, ...] = (),
    ) -> Answer:
        """The answer with its headers; that it is of one of the statuses `refused` is no error."""
        headers = {**self.headers, **(headers or {})}
        content = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(body).encode()
        answer = send(method, self.url + path, headers=headers, body=content, limit_s=limit_s)
        if answer.status >= 400 and answer.status not in refused:
            raise answer.fault(f"{method} {path}")
        return answer

    def pages(self, path: str, query: Mapping[str, str | None]) -> Iterator[dict[str, Any]]:
        """What a list has, page by page as it is read; parts of the query that are None are not asked."""
        given = {name: value for name, value in query.items() if value}
        token: str | None = ""
        while token is not None:
            words = urlencode({**given, "nextToken": token} if token else given)
            answer = self.ask("GET", f"{path}?{words}")
            yield from answer.json()
            token = answer.headers.get("x-next-token") or None

    def open(self, path: str, *, limit_s: float) -> HTTPResponse:
        """An answer that is to be read as it comes, to be closed by the caller."""
        import http.client

        address = urlsplit(self.url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(address.hostname or "127.0.0.1", address.port, timeout=limit_s)
        try:
            connection.request("GET", address.path + path, headers={**self.headers, "Connection": "close"})
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unreachable(f"the node at {self.url} does not answer: {error}") from error
