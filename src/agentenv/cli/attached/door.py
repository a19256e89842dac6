"""One sandbox, as a node's API has it: whether it runs, waking it, keeping it, and the way to its agent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentenv.cli.server import Node
from agentenv.errors import AenvError, NotFound

if TYPE_CHECKING:
    from agentenv.cli.attached.ways import Way
    from agentenv.cli.attached.wire import Agent

WAKE_S = 300  # how long a sandbox that is woken is to live, at least
KEPT_S = 60  # how long it is to live from each look at it, while somebody is attached
QUIET_S = 45.0  # the stream of events says something every 15 s


class Door:
    """A sandbox of a node, by its id."""

    def __init__(self, node: Node, sandbox_id: str) -> None:
        self._node = node
        self.id = sandbox_id

    def look(self) -> dict[str, Any]:
        """What the node says of it; NotFound if it has ended."""
        found: dict[str, Any] = self._node.call("GET", f"/sandboxes/{self.id}")
        return found

    def wake(self, least_s: int = WAKE_S) -> None:
        """Have it running, from its pause if need be, for so many seconds at least."""
        self._node.call("POST", f"/v2/sandboxes/{self.id}/connect", {"timeout": least_s}, limit_s=600)

    def keep(self) -> None:
        """Have it live a little longer than now; nothing, when that cannot be."""
        try:
            self._node.call("POST", f"/sandboxes/{self.id}/refreshes", {"duration": KEPT_S})
        except AenvError:
            pass  # paused, ended, or out of reach for the moment: who is attached finds out otherwise

    def delete(self) -> None:
        """End it; nothing, when it has ended."""
        try:
            self._node.call("DELETE", f"/sandboxes/{self.id}")
        except NotFound:
            pass

    def agent(self, *, user: str | None = None, wake: bool = True) -> Agent:
        """The way to its agent; a paused sandbox is woken.

        Raises:
            NotFound: it has ended. AenvError: it cannot be woken.
        """
        from agentenv.cli.attached.wire import Agent

        found = self.look()
        if wake and found["state"] == "paused":
            self.wake()
            found = self.look()
        return Agent(self._node.url, self.id, token=found.get("envdAccessToken"), user=user)

    def way(self) -> Way:
        """The way to its ports, private ones too; it runs."""
        from agentenv.cli.attached.ways import Way

        headers = dict(self._node.headers)
        if (self.look().get("network") or {}).get("allowPublicTraffic") is False:
            found = self._node.call("POST", f"/v2/sandboxes/{self.id}/connect", {"timeout": 0})
            headers["E2b-Traffic-Access-Token"] = str(found.get("trafficAccessToken"))
        return Way(self._node.url, self.id, headers)

    def watch(self, on_event: Callable[[], None]) -> Watch:
        """Be told when something happens to it, until the watch is closed."""
        return Watch(self._node, self.id, on_event)


class Watch:
    """Calls when an event of the sandbox comes, or the stream of them breaks off; by another thread."""

    def __init__(self, node: Node, sandbox_id: str, on_event: Callable[[], None]) -> None:
        self._stream = node.open(f"/events?sandbox_id={sandbox_id}", limit_s=QUIET_S)
        self._on_event = on_event
        self._closed = False
        threading.Thread(target=self._follow, name="events", daemon=True).start()

    def close(self) -> None:
        """Call no more. The thread ends with the next line: a reader that waits cannot be closed."""
        self._closed = True

    def _follow(self) -> None:
        from http.client import HTTPException

        with self._stream:
            try:
                for line in self._stream:
                    if self._closed:
                        return
                    if line.startswith(b"event:"):
                        self._on_event()
            except (OSError, HTTPException):
                pass  # it broke
        if not self._closed:
            self._on_event()
