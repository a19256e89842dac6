"""The few calls that commands make to the local node's API, on the standard library alone."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from agentenv.errors import HostFault

REQUEST_LIMIT_S = 60.0
AT_ONCE = 8


class LocalNode:
    """A node by its URL and key."""

    def __init__(self, url: str, api_key: str) -> None:
        self._address = urlsplit(url)
        self._key = api_key

    def count(self) -> int:
        """Sandboxes that run now."""
        return int(self._call("GET", "/v2/sandboxes?limit=1")[1].get("x-total-running", "0"))

    def end_all(self) -> int:
        """Delete every sandbox, a few at a time; returns how many there were."""
        ended = 0
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while sandboxes := self._call("GET", "/v2/sandboxes?limit=100")[0]:
                ids = [sandbox["sandboxID"] for sandbox in sandboxes]
                list(pool.map(lambda name: self._call("DELETE", f"/sandboxes/{name}", missing_ok=True), ids))
                ended += len(ids)
        return ended

    def _call(self, method: str, path: str, *, missing_ok: bool = False) -> tuple[Any, dict[str, str]]:
        host = self._address.hostname or "127.0.0.1"
        connection = http.client.HTTPConnection(host, self._address.port, timeout=REQUEST_LIMIT_S)
        try:
            connection.request(method, path, headers={"X-API-KEY": self._key})
            response = connection.getresponse()
            body = response.read()
        except OSError as error:
            raise HostFault(f"the node at {self._address.geturl()} does not answer: {error}") from error
        finally:
            connection.close()
        if response.status >= 400 and not (missing_ok and response.status == 404):
            raise HostFault(f"{method} {path}: {response.status} {body.decode(errors='replace')}")
        headers = {name.lower(): value for name, value in response.getheaders()}
        return (json.loads(body) if body else None), headers
