"""What being watched costs: commands with and without it, and a scrape of the metrics of many sandboxes.

    python bench/observe.py [--rounds 100] [--sandboxes 200] [--running 10] [--json]

Two nodes are started, one of which takes no samples and tells nobody anything; the other is also scraped
every second, with the figures of each sandbox, and its events are followed. Their commands are run in turns.
Then one gets `--sandboxes`, of which `--running` run and the others are paused: few hosts hold 200 that run.
"""

from __future__ import annotations

import argparse
import threading
import time
import urllib.request
from contextlib import ExitStack
from typing import Any

from agentenv import config
from measure import interleaved, show, summary
from stand import BenchNode, Client, node_on, scratch_home

QUIET = {"pool_most": "0", "slots_least": "0", "slots_most": "0"}
ROOMY = {
    **dict.fromkeys(("disk_overcommit", "memory_overcommit", "vcpu_overcommit"), "1000"),
    "max_sandboxes": "300",
}
UNWATCHED = """
from agentenv.cli import main
from agentenv.observe.observation import Observation
from agentenv.sandbox.service import Sandboxes
Observation.start = lambda self: None
Sandboxes.observe = lambda self, observer: None
main()
"""


def created(client: Client) -> dict[str, Any]:
    """A new sandbox."""
    body: dict[str, Any] = client.call("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 3600}).body
    return body


def key_of(node: BenchNode) -> str:
    """The node's API key."""
    return (node.settings.home / "api-key").read_text().strip()


def scrape(node: BenchNode, path: str = "/metrics") -> float:
    """Seconds that the metrics take."""
    asked = urllib.request.Request(f"{node.url}{path}", headers={"X-API-KEY": key_of(node)})
    begun = time.perf_counter()
    with urllib.request.urlopen(asked) as answer:
        answer.read()
    return time.perf_counter() - begun


class Watching:
    """Scrapes a node every second, and follows its events, on threads."""

    def __init__(self, node: BenchNode) -> None:
        self._over = threading.Event()
        follow = urllib.request.Request(f"{node.url}/events", headers={"X-API-KEY": key_of(node)})
        self._events = urllib.request.urlopen(follow)
        self._thread = threading.Thread(target=self._go_on, args=(node,))
        self._thread.start()

    def _go_on(self, node: BenchNode) -> None:
        while not self._over.wait(1):
            scrape(node)
            scrape(node, "/metrics/sandboxes")

    def close(self) -> None:
        """Watch no more."""
        self._over.set()
        self._thread.join()
        self._events.close()


def commands(stack: ExitStack, rounds: int) -> dict[str, Any]:
    """Commands of both nodes in turns."""
    home = config.load().home
    watched = stack.enter_context(node_on(stack.enter_context(scratch_home(home)), **QUIET))
    unwatched = stack.enter_context(
        node_on(stack.enter_context(scratch_home(home)), program=("-c", UNWATCHED), **QUIET)
    )
    clients = {"watched": watched.client(), "unwatched": unwatched.client()}
    sandboxes = {name: created(client) for name, client in clients.items()}
    watching = Watching(watched)
    try:
        taken = interleaved(
            {
                name: lambda name=name: clients[name].start_process(sandboxes[name], "true")  # type: ignore[misc]
                for name in clients
            },
            rounds,
        )
    finally:
        watching.close()
    result: dict[str, Any] = {name: summary(values) for name, values in taken.items()}
    result["ratio"] = round(result["watched"]["p50_ms"] / result["unwatched"]["p50_ms"], 3)
    return result


def scrapes(stack: ExitStack, sandboxes: int, running: int, rounds: int) -> dict[str, Any]:
    """Scrapes of a node with many sandboxes, and commands in one of them with and without."""
    home = stack.enter_context(scratch_home(config.load().home))
    node = stack.enter_context(node_on(home, **QUIET, **ROOMY))
    client = node.client()
    made = [created(client) for _ in range(running)]
    for _ in range(sandboxes - running):
        client.call("POST", f"/sandboxes/{created(client)['sandboxID']}/pause")
    client.start_process(made[0], "true")
    alone = [client.start_process(made[0], "true")[0] for _ in range(rounds)]
    taken, each, beside = [], [], []
    for _ in range(rounds):
        taken.append(scrape(node))
        each.append(scrape(node, "/metrics/sandboxes"))
        beside.append(client.start_process(made[0], "true")[0])
    return {
        "scrape": summary(taken),
        "scrape_of_each": summary(each),
        "command_alone": summary(alone),
        "command_after_scrape": summary(beside),
    }


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--sandboxes", type=int, default=200)
    parser.add_argument("--running", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        result = commands(stack, options.rounds)
    if options.sandboxes:
        with ExitStack() as stack:
            result |= scrapes(stack, options.sandboxes, options.running, max(10, options.rounds // 5))
    show({**result, "rounds": options.rounds, "sandboxes": options.sandboxes}, options.json)


if __name__ == "__main__":
    main()
