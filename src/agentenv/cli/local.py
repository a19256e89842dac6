"""The few calls that commands make to the local node's API, such as how many sandboxes run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentenv.cli.api import send
from agentenv.errors import HostFault, OutcomeUnknown

AT_ONCE = 8
PASSES = 20


class LocalNode:
    """A node by its URL and key."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url
        self._headers = {"X-API-KEY": api_key, "X-AgentENV-Project": "*"}  # of all projects

    def count(self) -> int:
        """Sandboxes that run now."""
        return int(self._call("GET", "/v2/sandboxes?limit=1")[1].get("x-total-running", "0"))

    def pause_all(self) -> int:
        """Pause every sandbox that runs, a few at a time; returns how many there were."""
        from concurrent.futures import ThreadPoolExecutor  # takes 10 ms, which --help has no use for

        paused = 0
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in range(PASSES):
                sandboxes = self._call("GET", "/v2/sandboxes?state=running&limit=100")[0]
                if not sandboxes:
                    return paused
                paused += sum(pool.map(self._pause, [sandbox["sandboxID"] for sandbox in sandboxes]))
        raise OutcomeUnknown(
            "some sandboxes run on, although all were paused again and again",
            remedy="see what is done with them, or stop with --keep",
        )

    def _pause(self, sandbox_id: str) -> bool:
        # 404: it ended meanwhile; 409: somebody else paused it, or it is busy and the next pass has it
        return self._call("POST", f"/sandboxes/{sandbox_id}/pause", accepted=(404, 409))[2] < 400

    def _call(
        self, method: str, path: str, *, accepted: tuple[int, ...] = ()
    ) -> tuple[Any, Mapping[str, str], int]:
        answer = send(method, self._url + path, headers=self._headers)
        if answer.status >= 400 and answer.status not in accepted:
            raise HostFault(
                f"{method} {path}: {answer.status} {answer.body.decode(errors='replace')}",
                remedy="look at the node's log",
            )
        return answer.json(), answer.headers, answer.status
